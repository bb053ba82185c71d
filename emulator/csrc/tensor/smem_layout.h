/* Where an operand of wgmma or tcgen05.mma lies in shared memory: the 64-bit matrix descriptors, the canonical layouts that
 * they stand for, and the swizzle.
 *
 * All layouts are built of 16-byte pieces. A piece is 16 / sizeof(element) elements along K (K-major) or along M|N
 * (MN-major); its address is an affine function of the descriptor's offsets, XOR-swizzled as a whole. */
#ifndef EMU_TENSOR_SMEM_LAYOUT_H
#define EMU_TENSOR_SMEM_LAYOUT_H

#include <stdint.h>

#include "numbers.h"

typedef enum {
    EMU_SWIZZLE_NONE,
    EMU_SWIZZLE_32B,
    EMU_SWIZZLE_64B,
    EMU_SWIZZLE_128B,
    EMU_SWIZZLE_128B_ATOM_32B, /* 128-byte swizzle of 32-byte atoms; MN-major only */
} emu_swizzle;

typedef struct {
    uint32_t start;       /* bytes, within the CTA's shared window of 256 KiB */
    uint32_t leading;     /* leading dimension byte offset */
    uint32_t stride;      /* stride dimension byte offset */
    uint32_t base_offset; /* in 128-byte rows: (address of the pattern's start >> 7) & 7 */
    emu_swizzle swizzle;
} emu_descriptor;

#define EMU_DESCRIPTOR_WINDOW 0x40000u /* a start address has 14 bits of 16 bytes */

/* Both decoders return NULL, or what is wrong with the descriptor. */
static inline const char *emu_decode_wgmma_descriptor(uint64_t d, emu_descriptor *out) {
    static const emu_swizzle mode[4] = {EMU_SWIZZLE_NONE, EMU_SWIZZLE_128B, EMU_SWIZZLE_64B, EMU_SWIZZLE_32B};
    out->start = (uint32_t)(d & 0x3fff) << 4;
    out->leading = (uint32_t)(d >> 16 & 0x3fff) << 4;
    out->stride = (uint32_t)(d >> 32 & 0x3fff) << 4;
    out->base_offset = (uint32_t)(d >> 49 & 7);
    out->swizzle = mode[d >> 62 & 3];
    return 0;
}

static inline const char *emu_decode_tcgen05_descriptor(uint64_t d, emu_descriptor *out) {
    out->start = (uint32_t)(d & 0x3fff) << 4;
    out->leading = (uint32_t)(d >> 16 & 0x3fff) << 4;
    out->stride = (uint32_t)(d >> 32 & 0x3fff) << 4;
    out->base_offset = (uint32_t)(d >> 49 & 7);
    switch (d >> 61 & 7) {
    case 0: out->swizzle = EMU_SWIZZLE_NONE; break;
    case 1: out->swizzle = EMU_SWIZZLE_128B_ATOM_32B; break;
    case 2: out->swizzle = EMU_SWIZZLE_128B; break;
    case 4: out->swizzle = EMU_SWIZZLE_64B; break;
    case 6: out->swizzle = EMU_SWIZZLE_32B; break;
    default: return "the swizzle mode (bits 61-63) is none of 0, 1, 2, 4, 6";
    }
    if ((d >> 46 & 7) != 1) return "bits 46-48 of a tcgen05 descriptor must be 0b001";
    if (d >> 52 & 1) return "an absolute leading dimension address (bit 52) is not modelled";
    if (d >> 53 & 0xff) return "bits 53-60 must be 0";
    return 0;
}

/* The swizzle: address bits [4, 4+B) are XORed with bits [7, 7+B); with 32-byte atoms, bits 5 and 6 with bits 7 and 8.
 * `base` shifts the phase of the pattern by rows of 128 bytes. */
static inline uint32_t emu_swizzle_address(emu_swizzle mode, uint32_t address, uint32_t base) {
    uint32_t row = (address >> 7) - base;
    switch (mode) {
    case EMU_SWIZZLE_32B: return address ^ (row & 1u) << 4;
    case EMU_SWIZZLE_64B: return address ^ (row & 3u) << 4;
    case EMU_SWIZZLE_128B: return address ^ (row & 7u) << 4;
    case EMU_SWIZZLE_128B_ATOM_32B: return address ^ (row & 3u) << 5;
    default: return address;
    }
}

static inline uint32_t emu_swizzle_pieces(emu_swizzle mode) { /* 16-byte pieces in one row of the swizzle atom */
    switch (mode) {
    case EMU_SWIZZLE_32B: return 2;
    case EMU_SWIZZLE_64B: return 4;
    case EMU_SWIZZLE_128B:
    case EMU_SWIZZLE_128B_ATOM_32B: return 8;
    default: return 1;
    }
}

/* Address of one piece. K-major: `major` is the piece along K, `minor` the row along M|N. MN-major: `major` is the piece
 * along M|N, `minor` the K index. The canonical layouts, in pieces (W: pieces in a row of the swizzle atom):
 *   K-major,  no swizzle: ((8,m),2) : ((1,SBO),LBO)      swizzled: ((8,m),2) : ((W,SBO),1)
 *   MN-major, no swizzle: ((1,m),(8,k)) : ((-,SBO),(1,LBO))  swizzled: ((W,m),(8,k)) : ((1,LBO),(W,SBO))
 *   MN-major, 128B of 32-byte atoms: ((8,m),(4,k)) : ((1,LBO),(8,SBO)) */
static inline uint32_t emu_piece_address(const emu_descriptor *d, int mn_major, uint32_t major, uint32_t minor) {
    uint32_t w = emu_swizzle_pieces(d->swizzle), at;
    if (!mn_major) {
        at = (minor % 8) * 16 * w + minor / 8 * d->stride;
        at += d->swizzle == EMU_SWIZZLE_NONE ? major * d->leading : major * 16;
    } else if (d->swizzle == EMU_SWIZZLE_NONE) {
        at = major * d->stride + minor % 8 * 16 + minor / 8 * d->leading;
    } else {
        uint32_t rows = d->swizzle == EMU_SWIZZLE_128B_ATOM_32B ? 4 : 8;
        at = major % w * 16 + major / w * d->leading + minor % rows * 16 * w + minor / rows * d->stride;
    }
    return emu_swizzle_address(d->swizzle, d->start + at, d->base_offset);
}

/* Addresses of the pieces of rows [first, first + mn) of an operand with K columns, K-major in the order (mn, k piece),
 * MN-major in the order (k, mn piece). Returns their number. `out` holds mn * k * element / 16. */
static inline int emu_operand_pieces(const emu_descriptor *d, int mn_major, int first, int mn, int k, int element,
                                     uint32_t *out) {
    int per = 16 / element, n = 0;
    if (!mn_major) {
        for (int row = first; row < first + mn; row++)
            for (int piece = 0; piece < k / per; piece++) out[n++] = emu_piece_address(d, 0, (uint32_t)piece, (uint32_t)row);
    } else {
        for (int step = 0; step < k; step++)
            for (int piece = first / per; piece < (first + mn) / per; piece++)
                out[n++] = emu_piece_address(d, 1, (uint32_t)piece, (uint32_t)step);
    }
    return n;
}

/* One format's gather: the loops see constant sizes, so that whole pieces convert as vectors. */
#define EMU_GATHER(NAME, T, CONVERT)                                                                                      \
    static inline void emu_gather_##NAME(const uint8_t *window, const uint32_t *pieces, int rows, int columns,     \
                                         uint32_t sign, float *out, int s_row, int s_column) {                             \
        enum { PER = 16 / sizeof(T) };                                                                                     \
        for (int row = 0; row < rows; row++)                                                                               \
            for (int piece = 0; piece < columns; piece++) {                                                                \
                T raw[PER];                                                                                                \
                float value[PER], *to = out + row * s_row + piece * PER * s_column;                                        \
                memcpy(raw, window + *pieces++, 16);                                                                       \
                for (int i = 0; i < PER; i++) value[i] = emu_bits_f32(emu_f32_bits(CONVERT(raw[i])) ^ sign);               \
                if (s_column == 1) memcpy(to, value, sizeof value);                                                        \
                else                                                                                                       \
                    for (int i = 0; i < PER; i++) to[i * s_column] = value[i];                                             \
            }                                                                                                              \
    }
EMU_GATHER(f16, uint16_t, emu_from_f16)
EMU_GATHER(bf16, uint16_t, emu_from_bf16)
EMU_GATHER(tf32, uint32_t, emu_from_tf32)
EMU_GATHER(e4m3, uint8_t, emu_from_e4m3)
EMU_GATHER(e5m2, uint8_t, emu_from_e5m2)
EMU_GATHER(s8, int8_t, (float))
EMU_GATHER(u8, uint8_t, (float))

/* Gathers an operand into dense fp32: out[mn * s_mn + k * s_k]. `window` is the CTA's shared memory from address 0 and
 * `pieces` what emu_operand_pieces gave (each checked by the caller). Negation flips the sign bit. */
static inline void emu_gather(const uint8_t *window, const uint32_t *pieces, int mn_major, int mn, int k, emu_format f,
                              int negate, float *out, int s_mn, int s_k) {
    int per = 16 / emu_format_bytes(f);
    int rows = mn_major ? k : mn, columns = (mn_major ? mn : k) / per;
    int s_row = mn_major ? s_k : s_mn, s_column = mn_major ? s_mn : s_k;
    uint32_t sign = negate ? 0x80000000u : 0;
    switch (f) {
    case EMU_F16: emu_gather_f16(window, pieces, rows, columns, sign, out, s_row, s_column); return;
    case EMU_BF16: emu_gather_bf16(window, pieces, rows, columns, sign, out, s_row, s_column); return;
    case EMU_TF32: emu_gather_tf32(window, pieces, rows, columns, sign, out, s_row, s_column); return;
    case EMU_E4M3: emu_gather_e4m3(window, pieces, rows, columns, sign, out, s_row, s_column); return;
    case EMU_E5M2: emu_gather_e5m2(window, pieces, rows, columns, sign, out, s_row, s_column); return;
    case EMU_S8: emu_gather_s8(window, pieces, rows, columns, sign, out, s_row, s_column); return;
    default: emu_gather_u8(window, pieces, rows, columns, sign, out, s_row, s_column); return;
    }
}

#endif

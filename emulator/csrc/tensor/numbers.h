/* Element formats of matrix operands: widths, conversion to fp32 and rounding back, exactly as the formats define them.
 *
 * Every source format here fits fp32 without rounding, so the products of two 16-bit, tf32 or 8-bit values are exact in fp32
 * down to its subnormals, and only sums round. */
#ifndef EMU_TENSOR_NUMBERS_H
#define EMU_TENSOR_NUMBERS_H

#include <stdint.h>
#include <string.h>

typedef enum {
    EMU_F16,
    EMU_BF16,
    EMU_TF32, /* 32-bit container; the low 13 bits are ignored, as the ISA says of .tf32 */
    EMU_E4M3,
    EMU_E5M2,
    EMU_S8,
    EMU_U8,
    EMU_F32,
    EMU_S32,
} emu_format;

static inline int emu_format_bytes(emu_format f) {
    switch (f) {
    case EMU_F16:
    case EMU_BF16: return 2;
    case EMU_E4M3:
    case EMU_E5M2:
    case EMU_S8:
    case EMU_U8: return 1;
    default: return 4;
    }
}

static inline float emu_bits_f32(uint32_t u) {
    float f;
    memcpy(&f, &u, 4);
    return f;
}

static inline uint32_t emu_f32_bits(float f) {
    uint32_t u;
    memcpy(&u, &f, 4);
    return u;
}

static inline float emu_from_f16(uint16_t h) {
    /* Rebias by a multiplication, which is exact and normalises subnormals; then mend infinities and NaN. */
    uint32_t sign = (uint32_t)(h & 0x8000u) << 16, rest = (uint32_t)(h & 0x7fffu) << 13;
    uint32_t u = emu_f32_bits(emu_bits_f32(rest) * 0x1p112f);
    u = rest >= 0x0f800000u ? rest | 0x7f800000u : u;
    return emu_bits_f32(u | sign);
}

static inline float emu_from_bf16(uint16_t h) { return emu_bits_f32((uint32_t)h << 16); }

static inline float emu_from_tf32(uint32_t u) { return emu_bits_f32(u & 0xffffe000u); }

/* fp8 e4m3: bias 7, no infinity, S.1111.111 is NaN. */
static inline float emu_from_e4m3(uint8_t b) {
    uint32_t exponent = (b >> 3) & 15u, mantissa = b & 7u;
    float magnitude;
    if (exponent == 15 && mantissa == 7) return emu_bits_f32(0x7fc00000u | (uint32_t)(b & 0x80u) << 24);
    if (exponent == 0) magnitude = (float)mantissa * 0x1p-9f;
    else magnitude = emu_bits_f32((exponent + 120u) << 23 | mantissa << 20);
    return b & 0x80u ? -magnitude : magnitude;
}

/* fp8 e5m2 is the upper byte of an fp16. */
static inline float emu_from_e5m2(uint8_t b) { return emu_from_f16((uint16_t)(b << 8)); }

/* fp32 to fp16, round to nearest even; NaN becomes the canonical NaN 0x7fff that the ISA's cvt gives. */
static inline uint16_t emu_to_f16(float f) {
    uint32_t u = emu_f32_bits(f), sign = (u >> 16) & 0x8000u;
    u &= 0x7fffffffu;
    if (u > 0x7f800000u) return 0x7fff;
    if (u >= 0x477ff000u) return (uint16_t)(sign | 0x7c00u); /* 65520 and above round to infinity */
    if (u < 0x38800000u) { /* below 2^-14: the fp32 adder rounds at 2^-24 when 0.5 is added */
        uint32_t r = emu_f32_bits(emu_bits_f32(u) + 0.5f) - 0x3f000000u;
        return (uint16_t)(sign | r);
    }
    u += 0xfffu + ((u >> 13) & 1u);
    return (uint16_t)(sign | (u - 0x38000000u) >> 13);
}

/* `count` elements of 16 bytes or less at `src`, as fp32. */
static inline void emu_unpack(emu_format f, const uint8_t *src, int count, float *out) {
    int i;
    switch (f) {
    case EMU_F16: {
        uint16_t h[8];
        memcpy(h, src, (size_t)count * 2);
        for (i = 0; i < count; i++) out[i] = emu_from_f16(h[i]);
        return;
    }
    case EMU_BF16: {
        uint16_t h[8];
        memcpy(h, src, (size_t)count * 2);
        for (i = 0; i < count; i++) out[i] = emu_from_bf16(h[i]);
        return;
    }
    case EMU_TF32: {
        uint32_t u[4];
        memcpy(u, src, (size_t)count * 4);
        for (i = 0; i < count; i++) out[i] = emu_from_tf32(u[i]);
        return;
    }
    case EMU_F32: memcpy(out, src, (size_t)count * 4); return;
    case EMU_E4M3:
        for (i = 0; i < count; i++) out[i] = emu_from_e4m3(src[i]);
        return;
    case EMU_E5M2:
        for (i = 0; i < count; i++) out[i] = emu_from_e5m2(src[i]);
        return;
    case EMU_S8: /* exact: |sum| of a whole K step stays far below 2^24 */
        for (i = 0; i < count; i++) out[i] = (float)(int8_t)src[i];
        return;
    case EMU_U8:
        for (i = 0; i < count; i++) out[i] = (float)src[i];
        return;
    default: return;
    }
}

#endif

/* Tensor memory: 128 lanes of 512 columns of 32 bits a CTA, its allocation, the layouts in which tcgen05.mma finds its
 * accumulator and its A operand, and the shapes of tcgen05.ld, st, cp and shift.
 *
 * An address has the lane in bits 16-31 and the column in bits 0-15. Nothing here knows of warps or checks; each function
 * yields (lane, column) pairs, or works on cells that the caller has vetted. */
#ifndef EMU_TENSOR_TMEM_H
#define EMU_TENSOR_TMEM_H

#include <stdint.h>
#include <string.h>

#include "numbers.h"

#define EMU_TMEM_LANES 128
#define EMU_TMEM_COLUMNS 512
#define EMU_TMEM_PITCH (EMU_TMEM_COLUMNS + 16) /* words from lane to lane: a power of two would put all in two cache sets */

typedef struct {
    uint32_t cell[EMU_TMEM_LANES][EMU_TMEM_PITCH];
    uint32_t written[EMU_TMEM_LANES][EMU_TMEM_COLUMNS / 32]; /* one bit a cell */
    uint16_t length[EMU_TMEM_COLUMNS];                       /* at the first column of an allocation: its columns */
    uint8_t taken[EMU_TMEM_COLUMNS];
    int relinquished, allocations;
} emu_tmem;

static inline uint32_t emu_tmem_lane(uint32_t address) { return address >> 16; }
static inline uint32_t emu_tmem_column(uint32_t address) { return address & 0xffff; }

static inline const char *emu_tmem_count_error(uint32_t columns) {
    if (columns < 32 || columns > 512 || (columns & (columns - 1))) return "the number of columns must be 32, 64, 128, 256 or 512";
    return 0;
}

/* First column of `columns` free ones, or -1: the caller waits. What an allocation holds is unwritten. */
static inline int emu_tmem_allocate(emu_tmem *t, uint32_t columns) {
    for (uint32_t at = 0; at + columns <= EMU_TMEM_COLUMNS; at += columns) {
        uint32_t n = 0;
        while (n < columns && !t->taken[at + n]) n++;
        if (n < columns) continue;
        memset(t->taken + at, 1, columns);
        t->length[at] = (uint16_t)columns;
        t->allocations++;
        for (int lane = 0; lane < EMU_TMEM_LANES; lane++) memset(&t->written[lane][at / 32], 0, columns / 8);
        return (int)at;
    }
    return -1;
}

static inline const char *emu_tmem_release(emu_tmem *t, uint32_t address, uint32_t columns) {
    uint32_t at = emu_tmem_column(address);
    if (emu_tmem_lane(address) || at >= EMU_TMEM_COLUMNS || !t->length[at]) return "this address was not allocated";
    if (t->length[at] != columns) return "the number of columns is not that of the allocation";
    memset(t->taken + at, 0, columns);
    t->length[at] = 0;
    t->allocations--;
    return 0;
}

/* Columns [column, column + columns) of one lane: inside tensor memory and allocated? */
static inline int emu_tmem_owned(const emu_tmem *t, uint32_t lane, uint32_t column, uint32_t columns) {
    return lane < EMU_TMEM_LANES && column + columns <= EMU_TMEM_COLUMNS && !memchr(t->taken + column, 0, columns);
}

/* Of the 32 cells from column 32 * word, the bits of those in [column, end). */
static inline uint32_t emu_tmem_bits(uint32_t word, uint32_t column, uint32_t end) {
    uint32_t low = column > 32 * word ? column - 32 * word : 0, high = end < 32 * word + 32 ? end - 32 * word : 32;
    return (high == 32 ? ~0u : (1u << high) - 1) & ~((1u << low) - 1);
}

/* The first column of the range that was never written, or -1. */
static inline int emu_tmem_unwritten(const emu_tmem *t, uint32_t lane, uint32_t column, uint32_t columns) {
    for (uint32_t word = column / 32; word * 32 < column + columns; word++) {
        uint32_t missing = emu_tmem_bits(word, column, column + columns) & ~t->written[lane][word];
        if (missing) return (int)(32 * word) + __builtin_ctz(missing);
    }
    return -1;
}

static inline void emu_tmem_mark(emu_tmem *t, uint32_t lane, uint32_t column, uint32_t columns) {
    for (uint32_t word = column / 32; word * 32 < column + columns; word++)
        t->written[lane][word] |= emu_tmem_bits(word, column, column + columns);
}

/* The instruction descriptor of kinds f16, tf32, f8f6f4 and i8. */
typedef enum { EMU_KIND_F16, EMU_KIND_TF32, EMU_KIND_F8F6F4, EMU_KIND_I8 } emu_kind;

typedef struct {
    emu_format a, b, d; /* d: EMU_F16 (one element a column, in its low half), EMU_F32 or EMU_S32 */
    int m, n, k, negate_a, negate_b, mn_major_a, mn_major_b, saturate;
} emu_instruction;

static inline const char *emu_decode_instruction(uint32_t i, emu_kind kind, int groups, emu_instruction *out) {
    uint32_t d = i >> 4 & 3, a = i >> 7 & 7, b = i >> 10 & 7;
    memset(out, 0, sizeof *out);
    out->saturate = (int)(i >> 3 & 1);
    out->negate_a = (int)(i >> 13 & 1);
    out->negate_b = (int)(i >> 14 & 1);
    out->mn_major_a = (int)(i >> 15 & 1);
    out->mn_major_b = (int)(i >> 16 & 1);
    out->n = (int)(i >> 17 & 63) * 8;
    out->m = (int)(i >> 24 & 31) * 16;
    if (i >> 2 & 1) return "sparse matrices are not modelled";
    if (i & 3 || i >> 6 & 1 || i >> 23 & 1 || i >> 29 & 7) return "a reserved bit is set";
    switch (kind) {
    case EMU_KIND_F16:
        if (a > 1 || b > 1) return "kind::f16 takes f16 (0) and bf16 (1) operands";
        out->a = a ? EMU_BF16 : EMU_F16;
        out->b = b ? EMU_BF16 : EMU_F16;
        if (d > 1) return "kind::f16 accumulates in f16 (0) or f32 (1)";
        if (d == 0 && (a || b)) return "an f16 accumulator needs f16 operands";
        out->k = 16;
        break;
    case EMU_KIND_TF32:
        if (a != 2 || b != 2) return "kind::tf32 takes tf32 (2) operands";
        if (d != 1) return "kind::tf32 accumulates in f32 (1)";
        out->a = out->b = EMU_TF32;
        out->k = 8;
        break;
    case EMU_KIND_F8F6F4:
        if (a > 1 || b > 1) return "of kind::f8f6f4 only e4m3 (0) and e5m2 (1) are modelled";
        out->a = a ? EMU_E5M2 : EMU_E4M3;
        out->b = b ? EMU_E5M2 : EMU_E4M3;
        if (d > 1) return "kind::f8f6f4 accumulates in f16 (0) or f32 (1)";
        out->k = 32;
        break;
    case EMU_KIND_I8:
        if (a > 1 || b > 1) return "kind::i8 takes u8 (0) and s8 (1) operands";
        out->a = a ? EMU_S8 : EMU_U8;
        out->b = b ? EMU_S8 : EMU_U8;
        if (d != 2) return "kind::i8 accumulates in s32 (2)";
        if (out->negate_a || out->negate_b) return "kind::i8 cannot negate";
        out->k = 32;
        break;
    }
    if (out->saturate && kind != EMU_KIND_I8) return "only kind::i8 saturates";
    out->d = d == 0 ? EMU_F16 : d == 1 ? EMU_F32 : EMU_S32;
    if (groups == 1 && out->m != 64 && out->m != 128) return "M must be 64 or 128 with cta_group::1";
    if (groups == 2 && out->m != 128 && out->m != 256) return "M must be 128 or 256 with cta_group::2";
    int step = groups == 2 || (kind == EMU_KIND_I8 && out->n > 32) ? 16 : 8;
    if (out->n < step || out->n > 256 || out->n % step) return "N is none of the sizes that this kind and group allow";
    return 0;
}

/* Data path layouts: row m of one CTA's part of D (or of A in tensor memory) lies in this lane. `rows`: the CTA's part, 64 or
 * 128. A lone CTA with 64 rows uses 16 of every 32 lanes, starting at lane 0 or 16 (layout F); a pair with 64 rows each puts
 * the right half of the columns into lanes 64-127 (layout B); else lane = row (layouts A and D). */
static inline uint32_t emu_row_lane(int rows, int groups, uint32_t base, int m) {
    if (rows == 64 && groups == 1) return base + (uint32_t)(m % 16 + m / 16 * 32);
    return base + (uint32_t)m;
}

static inline int emu_split_columns(int rows, int groups) { return rows == 64 && groups == 2; }

/* tcgen05.ld and st: the cell of register `r` of `lane`, relative to the address. Shapes count registers as the ISA does. */
typedef enum { EMU_LD_32X32B, EMU_LD_16X64B, EMU_LD_16X128B, EMU_LD_16X256B, EMU_LD_16X32BX2 } emu_ld_shape;

static inline int emu_ld_registers(emu_ld_shape s, int num) {
    return s == EMU_LD_16X128B ? 2 * num : s == EMU_LD_16X256B ? 4 * num : num;
}

static inline void emu_ld_cell(emu_ld_shape s, int r, int lane, int split, int *row, int *column) {
    switch (s) {
    case EMU_LD_16X64B: *row = lane / 4 + 8 * (lane % 2), *column = lane / 2 % 2 + 2 * r; return;
    case EMU_LD_16X128B: *row = lane / 4 + 8 * (r % 2), *column = lane % 4 + 4 * (r / 2); return;
    case EMU_LD_16X256B: *row = lane / 4 + 8 * (r / 2 % 2), *column = 2 * (lane % 4) + r % 2 + 8 * (r / 4); return;
    case EMU_LD_16X32BX2: *row = lane % 16, *column = r + (lane / 16) * split; return;
    default: *row = lane, *column = r; return; /* 32x32b */
    }
}

#endif

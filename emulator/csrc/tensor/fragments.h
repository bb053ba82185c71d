/* Which thread of a warp holds which element of a matrix operand in which register: mma.sync, wgmma and ldmatrix.
 *
 * Registers come as regs[i][lane], one array of 32 lanes per 32-bit register, as the ISA numbers them. Inside a warp the
 * accumulator of wgmma is that of mma.sync m16n8 repeated along N, and its A operand in registers is that of mma.sync. */
#ifndef EMU_TENSOR_FRAGMENTS_H
#define EMU_TENSOR_FRAGMENTS_H

#include <stdint.h>

#include "numbers.h"

/* Element `e` (low to high) of a 32-bit register of packed elements. */
static inline float emu_packed(emu_format f, uint32_t reg, int e) {
    uint8_t bytes[4];
    float out;
    memcpy(bytes, &reg, 4);
    emu_unpack(f, bytes + e * emu_format_bytes(f), 1, &out);
    return out;
}

/* A, 16 x K (8 x K with `rows` = 8): a slab is 16 bytes of K; register = row half + 2 * slab. */
static inline void emu_fragment_a(uint32_t *const *regs, emu_format f, int rows, int k, float *out, int ld) {
    int per = 4 / emu_format_bytes(f), halves = rows / 8, slab = 4 * per;
    for (int lane = 0; lane < 32; lane++)
        for (int h = 0; h < k / slab; h++)
            for (int half = 0; half < halves; half++)
                for (int e = 0; e < per; e++)
                    out[(lane / 4 + 8 * half) * ld + h * slab + per * (lane % 4) + e] =
                        emu_packed(f, regs[half + halves * h][lane], e);
}

/* B, K x 8, as out[k * ld + n]. */
static inline void emu_fragment_b(uint32_t *const *regs, emu_format f, int k, float *out, int ld) {
    int per = 4 / emu_format_bytes(f), slab = 4 * per;
    for (int lane = 0; lane < 32; lane++)
        for (int h = 0; h < k / slab; h++)
            for (int e = 0; e < per; e++) out[(h * slab + per * (lane % 4) + e) * ld + lane / 4] = emu_packed(f, regs[h][lane], e);
}

/* Accumulator, `rows` (8 or 16) x N in 32-bit elements: register = i + 2 * half + 4 * (n / 8) at 16 rows. */
static inline void emu_fragment_c32(uint32_t *const *regs, int rows, int n, uint32_t *dense, int ld, int store) {
    int halves = rows / 8;
    for (int j = 0; j < n / 8; j++)
        for (int half = 0; half < halves; half++)
            for (int i = 0; i < 2; i++) {
                uint32_t *reg = regs[i + 2 * half + 2 * halves * j];
                for (int lane = 0; lane < 32; lane++) {
                    uint32_t *at = dense + (lane / 4 + 8 * half) * ld + 8 * j + 2 * (lane % 4) + i;
                    if (store) reg[lane] = *at;
                    else *at = reg[lane];
                }
            }
}

/* The same with two fp16 in a register; the dense matrix is fp32. */
static inline void emu_fragment_c16(uint32_t *const *regs, int rows, int n, float *dense, int ld, int store) {
    int halves = rows / 8;
    for (int j = 0; j < n / 8; j++)
        for (int half = 0; half < halves; half++) {
            uint32_t *reg = regs[half + halves * j];
            for (int lane = 0; lane < 32; lane++) {
                float *at = dense + (lane / 4 + 8 * half) * ld + 8 * j + 2 * (lane % 4);
                if (store) reg[lane] = (uint32_t)emu_to_f16(at[1]) << 16 | emu_to_f16(at[0]);
                else {
                    at[0] = emu_from_f16((uint16_t)reg[lane]);
                    at[1] = emu_from_f16((uint16_t)(reg[lane] >> 16));
                }
            }
        }
}

/* One 8x8 matrix of 16-bit elements between rows[8][8] and a register across the warp, as ldmatrix and stmatrix place it:
 * lane t holds row t/4, columns 2(t%4) and 2(t%4)+1; transposed, column t/4, rows 2(t%4) and 2(t%4)+1. */
static inline uint32_t emu_matrix8_pick(uint16_t rows[8][8], int lane, int transposed) {
    int a = lane / 4, b = 2 * (lane % 4);
    return transposed ? (uint32_t)rows[b + 1][a] << 16 | rows[b][a] : (uint32_t)rows[a][b + 1] << 16 | rows[a][b];
}

static inline void emu_matrix8_place(uint16_t rows[8][8], int lane, int transposed, uint32_t value) {
    int a = lane / 4, b = 2 * (lane % 4);
    if (transposed) {
        rows[b][a] = (uint16_t)value;
        rows[b + 1][a] = (uint16_t)(value >> 16);
    } else {
        rows[a][b] = (uint16_t)value;
        rows[a][b + 1] = (uint16_t)(value >> 16);
    }
}

#endif

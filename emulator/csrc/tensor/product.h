/* The dense product at the heart of every matrix instruction.
 *
 * The ISA leaves the order and the width of tensor-core sums open. Here each accumulator takes its products one by one with
 * k ascending, acc += a[k] * b[k], rounded to nearest even at every step. The product itself is exact in fp32 for every source
 * format (unless it under- or overflows), so this is a chain of fused multiply-adds. Integer sums are exact in int32. */
#ifndef EMU_TENSOR_PRODUCT_H
#define EMU_TENSOR_PRODUCT_H

#include <stdint.h>
#include <string.h>

#ifdef __AVX512F__
#define EMU_VECTOR 16
#define EMU_BLOCK 4 /* vectors of columns that a tile of rows keeps in registers */
#else
#define EMU_VECTOR 8
#define EMU_BLOCK 2
#endif
#define EMU_TILE 4 /* rows */

typedef float emu_vector __attribute__((vector_size(EMU_VECTOR * 4), aligned(4), may_alias));

/* `rows` x `vectors` accumulators held in registers while k runs; both constants where this is inlined. */
static inline __attribute__((always_inline)) void emu_tile(float *d, int ldd, const float *a, int lda, const float *b, int ldb,
                                                           int k, int rows, int vectors) {
    emu_vector acc[EMU_TILE][EMU_BLOCK];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++) acc[r][v] = *(const emu_vector *)(d + r * ldd + v * EMU_VECTOR);
    for (int i = 0; i < k; i++)
        for (int v = 0; v < vectors; v++) {
            emu_vector right = *(const emu_vector *)(b + i * ldb + v * EMU_VECTOR);
            for (int r = 0; r < rows; r++) acc[r][v] += a[r * lda + i] * right;
        }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++) *(emu_vector *)(d + r * ldd + v * EMU_VECTOR) = acc[r][v];
}

static inline __attribute__((always_inline)) void emu_rows(float *d, int ldd, const float *a, int lda, const float *b, int ldb,
                                                           int n, int k, int rows) {
    int j = 0;
    for (; j + EMU_BLOCK * EMU_VECTOR <= n; j += EMU_BLOCK * EMU_VECTOR) emu_tile(d + j, ldd, a, lda, b + j, ldb, k, rows, EMU_BLOCK);
    for (; j + EMU_VECTOR <= n; j += EMU_VECTOR) emu_tile(d + j, ldd, a, lda, b + j, ldb, k, rows, 1);
    for (int r = 0; j < n && r < rows; r++)
        for (int c = j; c < n; c++)
            for (int i = 0; i < k; i++) d[r * ldd + c] += a[r * lda + i] * b[i * ldb + c];
}

/* d[m][n] += sum over k of a[m][k] * b[k][n], rows `ldd`, `lda`, `ldb` apart. */
static inline void emu_product(float *d, int ldd, const float *a, int lda, const float *b, int ldb, int m, int n, int k) {
    int row = 0;
    for (; row + EMU_TILE <= m; row += EMU_TILE) emu_rows(d + row * ldd, ldd, a + row * lda, lda, b, ldb, n, k, EMU_TILE);
    for (; row < m; row++) emu_rows(d + row * ldd, ldd, a + row * lda, lda, b, ldb, n, k, 1);
}

/* The same for integers held in fp32 (|a|, |b| <= 255, k <= 64: every partial sum is exact), added to int32 with wrap-around,
 * or clamped when `saturate` asks for it; n <= 256. */
static inline void emu_product_s32(int32_t *d, int ldd, const float *a, int lda, const float *b, int ldb, int m, int n, int k,
                                   int saturate) {
    float sum[256];
    for (int row = 0; row < m; row++) {
        memset(sum, 0, (size_t)n * sizeof *sum);
        emu_product(sum, n, a + row * lda, lda, b, ldb, 1, n, k);
        for (int j = 0; j < n; j++) {
            int32_t *to = d + row * ldd + j;
            int64_t total = (int64_t)*to + (int64_t)sum[j];
            if (saturate && total > INT32_MAX) total = INT32_MAX;
            if (saturate && total < INT32_MIN) total = INT32_MIN;
            *to = (int32_t)(uint32_t)(uint64_t)total;
        }
    }
}

#endif

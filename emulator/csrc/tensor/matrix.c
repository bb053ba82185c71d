/* ldmatrix, stmatrix, movmatrix, mma.sync and wgmma. */
#include "units.h"

#include <stdlib.h>

#include "fragments.h"
#include "operand.h"
#include "product.h"

#define EMU_WARP_ROWS 16
#define EMU_NAN16 0x7fff /* in f16 and in bf16 */

static int whole_warp(emu_warp *w, uint32_t mask, const char *what) {
    if (mask == 0xffffffffu) return 1;
    emu_finding(w, EMU_F_BARRIER, "%s needs all 32 threads of the warp, executed by mask 0x%08x", what, mask);
    return 0;
}

/* Wavefronts of eight 16-byte rows: rows of one 16-byte bank group and different addresses queue. */
static void count_rows(emu_warp *w, emu_in32 address, int first) {
    uint32_t most = 1;
    for (int i = 0; i < 8; i++) {
        uint32_t n = 1;
        for (int j = 0; j < i; j++) {
            uint32_t a = address[first + i], b = address[first + j];
            if (a == b) {
                n = 0;
                break;
            }
            n += (a >> 4 & 7) == (b >> 4 & 7);
        }
        if (n > most) most = n;
    }
    emu_count(w, EMU_C_SHARED_ACCESSES, 1);
    emu_count(w, EMU_C_SHARED_WAVES, most);
}

static uint8_t *matrix_row(emu_warp *w, uint32_t address, int lane, uint32_t access, const char *what) {
    w->lane = lane;
    if (!emu_aligned(w, address, 16, what)) return 0;
    return emu_shared(w, address, 16, access);
}

/* A matrix after the first of which nothing was ever written: rows that the kernel does not have. */
static int absent(emu_warp *w, emu_in32 address, int matrix) {
    for (int row = 0; row < 8; row++) {
        uint32_t at = address[8 * matrix + row];
        if (at & 15 || emu_settled(w, at, 16, 0) || !emu_settled(w, at, 16, EMU_NOINIT)) return 0;
    }
    return matrix > 0;
}

/* As for operands in shared memory (operand.h): row 0 of each 8x8 matrix must be settled unless the matrix is absent; another row
 * that is not reads as NaN. */
void emu_ldmatrix(emu_warp *w, uint32_t mask, int count, int transposed, emu_out32 const *out, emu_in32 address) {
    if (!whole_warp(w, mask, "ldmatrix")) return;
    for (int matrix = 0; matrix < count; matrix++) {
        uint16_t rows[8][8];
        int none = absent(w, address, matrix);
        for (int row = 0; row < 8; row++) {
            uint32_t at = address[8 * matrix + row];
            if ((row || none) && !(at & 15) && !emu_settled(w, at, 16, 0)) {
                for (int i = 0; i < 8; i++) rows[row][i] = EMU_NAN16;
                continue;
            }
            const uint8_t *from = matrix_row(w, at, 8 * matrix + row, EMU_READ, "an ldmatrix row");
            if (from) memcpy(rows[row], from, 16);
            else memset(rows[row], 0, 16);
        }
        count_rows(w, address, 8 * matrix);
        for (int lane = 0; lane < 32; lane++) out[matrix][lane] = emu_matrix8_pick(rows, lane, transposed);
    }
    w->lane = -1;
}

void emu_stmatrix(emu_warp *w, uint32_t mask, int count, int transposed, emu_in32 const *in, emu_in32 address) {
    if (!whole_warp(w, mask, "stmatrix")) return;
    for (int matrix = 0; matrix < count; matrix++) {
        uint16_t rows[8][8];
        for (int lane = 0; lane < 32; lane++) emu_matrix8_place(rows, lane, transposed, in[matrix][lane]);
        for (int row = 0; row < 8; row++) {
            uint8_t *to = matrix_row(w, address[8 * matrix + row], 8 * matrix + row, EMU_WRITE, "an stmatrix row");
            if (to) memcpy(to, rows[row], 16);
        }
        count_rows(w, address, 8 * matrix);
    }
    w->lane = -1;
}

void emu_movmatrix(emu_warp *w, uint32_t mask, emu_out32 out, emu_in32 in) {
    uint16_t rows[8][8];
    if (!whole_warp(w, mask, "movmatrix")) return;
    for (int lane = 0; lane < 32; lane++) emu_matrix8_place(rows, lane, 0, in[lane]);
    for (int lane = 0; lane < 32; lane++) out[lane] = emu_matrix8_pick(rows, lane, 1);
}

/* Accumulators of `rows` x n between registers and a dense matrix of 32-bit words. */
static void accumulator(emu_format f, emu_out32 const *regs, int rows, int n, uint32_t *dense, int store) {
    if (f == EMU_F16) emu_fragment_c16(regs, rows, n, (float *)dense, n, store);
    else emu_fragment_c32(regs, rows, n, dense, n, store);
}

void emu_mma_sync(emu_warp *w, uint32_t mask, int m, int n, int k, emu_format fa, emu_format fb, emu_format fd, emu_format fc,
                  int saturate, emu_out32 const *d, emu_in32 const *a, emu_in32 const *b, emu_in32 const *c) {
    float left[EMU_WARP_ROWS * 64], right[64 * 8];
    uint32_t sum[EMU_WARP_ROWS * 8];
    if (!whole_warp(w, mask, "mma")) return;
    emu_fragment_a((uint32_t *const *)a, fa, m, k, left, k);
    emu_fragment_b((uint32_t *const *)b, fb, k, right, n);
    accumulator(fc, (emu_out32 const *)c, m, n, sum, 0);
    if (fd == EMU_S32) emu_product_s32((int32_t *)sum, n, left, k, right, n, m, n, k, saturate);
    else emu_product((float *)sum, n, left, k, right, n, m, n, k);
    accumulator(fd, d, m, n, sum, 1);
    emu_count(w, EMU_C_MATRIX_FLOPS, 2ull * (uint64_t)(m * n * k));
}

static emu_flight *flight_of(emu_warp *w) {
    if (!w->unit) w->unit = calloc(1, sizeof(emu_flight));
    return w->unit;
}

static int in_flight(const emu_flight *f, const void *reg) {
    for (uint32_t i = 0; i < f->count; i++)
        if (f->item[i].reg == reg) return (int)i;
    return -1;
}

void emu_flight_start(emu_warp *w, const void *reg, uint32_t group) {
    emu_flight *f = flight_of(w);
    int at = in_flight(f, reg);
    if (at < 0 && f->count == sizeof f->item / sizeof f->item[0]) return;
    if (at < 0) at = (int)f->count++;
    f->item[at].reg = reg;
    f->item[at].group = group;
}

void emu_flight_touched(emu_warp *w, const void *reg, const char *name, int write) {
    emu_flight *f = flight_of(w);
    int at = in_flight(f, reg);
    if (at < 0) return;
    w->lane = -1;
    emu_finding(w, EMU_F_ASYNC, "%s register %s, which %s", write ? "writes" : "reads", name,
                f->item[at].group == EMU_FLIGHT_LD ? "tcgen05.ld has not loaded until tcgen05.wait::ld"
                                                   : "wgmma works on until wgmma.wait_group");
    f->item[at] = f->item[--f->count]; /* once a register */
}

void emu_flight_moved(emu_warp *w, const void *const *to, const void *const *from) {
    emu_flight *f = flight_of(w);
    int at = -1;
    for (; *from && at < 0; from++) at = in_flight(f, *from);
    uint32_t group = at >= 0 ? f->item[at].group : 0;
    for (; *to; to++) {
        int old = in_flight(f, *to);
        if (at >= 0) emu_flight_start(w, *to, group);
        else if (old >= 0) f->item[old] = f->item[--f->count];
    }
}

/* Groups of wgmma before this one are done. */
static void land(emu_flight *f, uint32_t before) {
    uint32_t kept = 0;
    for (uint32_t i = 0; i < f->count; i++)
        if (f->item[i].group >= before) f->item[kept++] = f->item[i];
    f->count = kept;
}

void emu_flight_loaded(emu_warp *w) {
    emu_flight *f = flight_of(w);
    uint32_t kept = 0;
    for (uint32_t i = 0; i < f->count; i++)
        if (f->item[i].group != EMU_FLIGHT_LD) f->item[kept++] = f->item[i];
    f->count = kept;
}

void emu_wgmma(emu_warp *w, uint32_t mask, int n, int k, emu_format fa, emu_format fb, emu_format fd, int saturate,
               emu_out32 const *d, emu_in64 a_desc, emu_in32 const *a_regs, emu_in64 b_desc, emu_in32 scale_d, int negate_a,
               int negate_b, int mn_major_a, int mn_major_b) {
    static __thread float left[EMU_WARP_ROWS * 32], right[32 * 256];
    static __thread uint32_t sum[EMU_WARP_ROWS * 256];
    emu_descriptor da, db;
    if (!whole_warp(w, mask, "wgmma")) return;
    w->lane = -1;
    for (int lane = 1; lane < 32; lane++)
        if (b_desc[lane] != b_desc[0] || (a_desc && a_desc[lane] != a_desc[0])) {
            emu_finding(w, EMU_F_DESCRIPTOR, "wgmma descriptors differ between lanes 0 and %d", lane);
            break;
        }
    emu_async_begin(w, EMU_TWIN_WGMMA);
    if (a_desc) {
        emu_decode_wgmma_descriptor(a_desc[0], &da);
        emu_gather_shared(w, w->cta, &da, mn_major_a, (int)(w->index % 4) * EMU_WARP_ROWS, EMU_WARP_ROWS, k, fa, negate_a, left, k, 1);
    } else {
        emu_fragment_a((uint32_t *const *)a_regs, fa, EMU_WARP_ROWS, k, left, k);
        if (negate_a)
            for (int i = 0; i < EMU_WARP_ROWS * k; i++) left[i] = -left[i];
    }
    emu_decode_wgmma_descriptor(b_desc[0], &db);
    emu_gather_shared(w, w->cta, &db, mn_major_b, 0, n, k, fb, negate_b, right, 1, n);
    if (!scale_d || scale_d[0]) accumulator(fd, d, EMU_WARP_ROWS, n, sum, 0);
    else memset(sum, 0, sizeof(uint32_t) * (size_t)(EMU_WARP_ROWS * n));
    if (fd == EMU_S32) emu_product_s32((int32_t *)sum, n, left, k, right, n, EMU_WARP_ROWS, n, k, saturate);
    else emu_product((float *)sum, n, left, k, right, n, EMU_WARP_ROWS, n, k);
    accumulator(fd, d, EMU_WARP_ROWS, n, sum, 1);
    emu_async_join(w, EMU_Q_WGMMA);
    uint32_t group = flight_of(w)->committed;
    for (int i = 0; i < (fd == EMU_F16 ? n / 4 : n / 2); i++) emu_flight_start(w, d[i], group);
    for (int i = 0; a_regs && i < 4; i++) emu_flight_start(w, a_regs[i], group);
    emu_count(w, EMU_C_MATRIX_FLOPS, 2ull * (uint64_t)(EMU_WARP_ROWS * n * k));
}

void emu_wgmma_commit(emu_warp *w, uint32_t mask) {
    if (!whole_warp(w, mask, "wgmma.commit_group")) return;
    emu_async_commit(w, EMU_Q_WGMMA);
    flight_of(w)->committed++;
}

void emu_wgmma_wait(emu_warp *w, uint32_t mask, int pending) {
    emu_flight *f = flight_of(w);
    if (!whole_warp(w, mask, "wgmma.wait_group")) return;
    emu_async_wait(w, EMU_Q_WGMMA, (uint32_t)pending);
    if (f->committed >= (uint32_t)pending) land(f, f->committed - (uint32_t)pending);
}

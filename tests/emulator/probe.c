/* What tests/emulator/probe.py reaches of the emulator's layout and number code, which is header-only. */
#include "fragments.h"
#include "numbers.h"
#include "product.h"
#include "smem_layout.h"
#include "tensor_map.h"
#include "tmem.h"

void unpack(int format, const uint8_t *src, int count, float *out) {
    for (int i = 0; i < count; i++) emu_unpack((emu_format)format, src + i * emu_format_bytes((emu_format)format), 1, out + i);
}

void to_f16(const float *src, int count, uint16_t *out) {
    for (int i = 0; i < count; i++) out[i] = emu_to_f16(src[i]);
}

uint32_t swizzle(int mode, uint32_t address, uint32_t base) { return emu_swizzle_address((emu_swizzle)mode, address, base); }

const char *descriptor(int generation, uint64_t bits, uint32_t out[5]) {
    emu_descriptor d;
    memset(&d, 0, sizeof d);
    const char *error = generation == 9 ? emu_decode_wgmma_descriptor(bits, &d) : emu_decode_tcgen05_descriptor(bits, &d);
    out[0] = d.start, out[1] = d.leading, out[2] = d.stride, out[3] = d.base_offset, out[4] = d.swizzle;
    return error;
}

static emu_descriptor decoded(int generation, uint64_t bits) {
    emu_descriptor d;
    if (generation == 9) emu_decode_wgmma_descriptor(bits, &d);
    else emu_decode_tcgen05_descriptor(bits, &d);
    return d;
}

int pieces(int generation, uint64_t bits, int mn_major, int first, int mn, int k, int element, uint32_t *out) {
    emu_descriptor d = decoded(generation, bits);
    return emu_operand_pieces(&d, mn_major, first, mn, k, element, out);
}

void gather(int generation, uint64_t bits, const uint8_t *window, int mn_major, int mn, int k, int format, int negate, float *out,
            int s_mn, int s_k) {
    uint32_t at[4096];
    emu_descriptor d = decoded(generation, bits);
    emu_operand_pieces(&d, mn_major, 0, mn, k, emu_format_bytes((emu_format)format), at);
    emu_gather(window, at, mn_major, mn, k, (emu_format)format, negate, out, s_mn, s_k);
}

void product(float *d, const float *a, const float *b, int m, int n, int k) { emu_product(d, n, a, k, b, n, m, n, k); }

void product_s32(int32_t *d, const float *a, const float *b, int m, int n, int k, int saturate) {
    emu_product_s32(d, n, a, k, b, n, m, n, k, saturate);
}

static void pointers(uint32_t *flat, int count, uint32_t **regs) {
    for (int i = 0; i < count; i++) regs[i] = flat + 32 * i;
}

void fragment_a(uint32_t *flat, int format, int rows, int k, float *out) {
    uint32_t *regs[8];
    pointers(flat, 8, regs);
    emu_fragment_a(regs, (emu_format)format, rows, k, out, k);
}

void fragment_b(uint32_t *flat, int format, int k, float *out) {
    uint32_t *regs[8];
    pointers(flat, 8, regs);
    emu_fragment_b(regs, (emu_format)format, k, out, 8);
}

void fragment_c32(uint32_t *flat, int rows, int n, uint32_t *dense, int store) {
    uint32_t *regs[128];
    pointers(flat, 128, regs);
    emu_fragment_c32(regs, rows, n, dense, n, store);
}

void fragment_c16(uint32_t *flat, int rows, int n, float *dense, int store) {
    uint32_t *regs[128];
    pointers(flat, 128, regs);
    emu_fragment_c16(regs, rows, n, dense, n, store);
}

void matrix8(uint16_t *rows, uint32_t *reg, int transposed, int store) {
    for (int lane = 0; lane < 32; lane++) {
        if (store) emu_matrix8_place((uint16_t(*)[8])rows, lane, transposed, reg[lane]);
        else reg[lane] = emu_matrix8_pick((uint16_t(*)[8])rows, lane, transposed);
    }
}

const char *instruction(uint32_t bits, int kind, int groups, int out[10]) {
    emu_instruction i;
    const char *error = emu_decode_instruction(bits, (emu_kind)kind, groups, &i);
    int values[10] = {i.a, i.b, i.d, i.m, i.n, i.k, i.negate_a, i.negate_b, i.mn_major_a, i.mn_major_b};
    memcpy(out, values, sizeof values);
    return error;
}

uint32_t row_lane(int rows, int groups, uint32_t base, int m) { return emu_row_lane(rows, groups, base, m); }

void ld_cell(int shape, int r, int lane, int split, int *row, int *column) {
    emu_ld_cell((emu_ld_shape)shape, r, lane, split, row, column);
}

static emu_tmem tmem;

void tmem_reset(void) { memset(&tmem, 0, sizeof tmem); }
int tmem_allocate(uint32_t columns) { return emu_tmem_allocate(&tmem, columns); }
const char *tmem_free(uint32_t address, uint32_t columns) { return emu_tmem_release(&tmem, address, columns); }
int tmem_owned(uint32_t lane, uint32_t column, uint32_t columns) { return emu_tmem_owned(&tmem, lane, column, columns); }
int tmem_allocations(void) { return tmem.allocations; }

/* A box copied from global memory (the tensor's own address is replaced by `base`) into `shared`, whose first byte has the
 * shared address `address`; `store` goes the other way. Returns what is wrong with the map. */
const char *copy_box(const uint8_t *map, uint8_t *base, const int32_t *at, uint8_t *shared, uint32_t address, int store) {
    emu_tensor_map t;
    emu_box_walk walk;
    emu_box_row row;
    const char *error = emu_decode_tensor_map(map, &t);
    if (error) return error;
    emu_box_start(&walk, &t, at);
    while (emu_box_next(&walk, &row))
        for (int i = 0; i < t.box[0]; i++) {
            uint32_t byte = address + row.offset + (uint32_t)(i * t.element);
            uint8_t *cell = shared + (emu_tensor_map_swizzle(&t, byte) - address);
            int inside = i >= row.first && i < row.last;
            uint8_t *global = inside ? base + (row.global - t.address) + i * t.element : 0;
            if (store) {
                if (inside) memcpy(global, cell, (size_t)t.element);
            } else if (inside) memcpy(cell, global, (size_t)t.element);
            else emu_tensor_map_fill(&t, cell, t.element);
        }
    return 0;
}

const char *map_fields(const uint8_t *map, int64_t out[24]) {
    emu_tensor_map t;
    const char *error = emu_decode_tensor_map(map, &t);
    int n = 0;
    out[n++] = (int64_t)t.address, out[n++] = t.rank, out[n++] = t.element, out[n++] = t.swizzle, out[n++] = t.fill_nan;
    for (int i = 0; i < 5; i++) out[n++] = t.dim[i];
    for (int i = 1; i < 5; i++) out[n++] = (int64_t)t.stride[i];
    for (int i = 0; i < 5; i++) out[n++] = t.box[i];
    for (int i = 0; i < 5; i++) out[n++] = t.element_stride[i];
    return error;
}

/* ---- the units themselves, on a stand-in for the machine: a cluster of two CTAs, no shadow state */
#include <stdarg.h>
#include <stdio.h>

#include "copy.c"
#include "matrix.c"
#include "tcgen05.c"

#define WINDOW 0x40000u

static uint8_t windows[2][WINDOW];
static emu_cta cta[2];
static emu_cta *ctas[2] = {&cta[0], &cta[1]};
static emu_cluster cluster;
static emu_warp warps[16];
static char findings[4096];
static uint32_t transactions[2], arrivals[2];
int relaxed_order = 1; /* 0: what another agent did is never ordered before */

void machine_reset(void) {
    memset(&cluster, 0, sizeof cluster);
    cluster.ctas = ctas;
    cluster.size = 2;
    for (uint32_t i = 0; i < 2; i++) {
        free(cta[i].tmem);
        memset(&cta[i], 0, sizeof cta[i]);
        memset(windows[i], 0, WINDOW);
        cta[i].cluster = &cluster, cta[i].rank = i, cta[i].shared = windows[i], cta[i].shared_end = WINDOW;
        transactions[i] = arrivals[i] = 0;
    }
    for (uint32_t i = 0; i < 16; i++) {
        memset(&warps[i], 0, sizeof warps[i]);
        warps[i].cta = &cta[i / 8], warps[i].index = i % 8;
    }
    findings[0] = 0;
}

uint8_t *machine_window(int rank) { return windows[rank]; }
const char *machine_findings(void) { return findings; }
emu_tmem *machine_tmem(int rank) { return tmem_of(&cta[rank]); }
uint32_t machine_transactions(int rank) { return transactions[rank]; }
uint32_t machine_arrivals(int rank) { return arrivals[rank]; }
emu_warp *machine_warp(int i) { return &warps[i]; }

void emu_finding(emu_warp *w, emu_category category, const char *format, ...) {
    va_list list;
    size_t used = strlen(findings);
    (void)w;
    used += (size_t)snprintf(findings + used, sizeof findings - used, "[%d] ", (int)category);
    va_start(list, format);
    vsnprintf(findings + used, sizeof findings - used - 1, format, list);
    va_end(list);
    strcat(findings, "\n");
}

uint8_t *emu_shared(emu_warp *w, uint32_t address, uint32_t bytes, uint32_t access) {
    uint32_t rank = address >> EMU_SHARED_RANK_SHIFT, at = address & 0xffffff;
    (void)access;
    if (rank < 2 && at + bytes <= WINDOW) return windows[rank] + at;
    emu_finding(w, EMU_F_BOUNDS, "shared 0x%x", address);
    return 0;
}

/* What the test says is unsettled: [unsettled_from, unsettled_to) of CTA 0. */
uint32_t unsettled_from, unsettled_to;

int emu_settled(emu_warp *w, uint32_t address, uint32_t bytes, uint32_t access) {
    (void)w, (void)access;
    return address + bytes <= unsettled_from || address >= unsettled_to;
}

uint8_t *emu_global(emu_warp *w, uint64_t address, uint64_t bytes, uint32_t access) {
    (void)w, (void)bytes, (void)access;
    return (uint8_t *)(uintptr_t)address;
}

const uint8_t *emu_generic_read(emu_warp *w, uint64_t address, uint32_t bytes) { return emu_global(w, address, bytes, EMU_READ); }

int emu_aligned(emu_warp *w, uint64_t address, uint32_t alignment, const char *what) {
    if (address % alignment) emu_finding(w, EMU_F_ALIGN, "%s", what);
    return address % alignment == 0;
}

emu_cta *emu_cluster_cta(emu_warp *w, uint32_t rank) {
    (void)w;
    return &cta[rank];
}

void emu_mbar_complete_tx(emu_warp *w, uint32_t address, uint32_t bytes) {
    (void)w;
    transactions[address >> EMU_SHARED_RANK_SHIFT] += bytes;
}

void emu_mbar_arrive_async(emu_warp *w, uint32_t address, uint32_t count) {
    (void)w;
    arrivals[address >> EMU_SHARED_RANK_SHIFT] += count;
}

void emu_async_begin(emu_warp *w, uint32_t twin) { (void)w, (void)twin; }
void emu_async_join(emu_warp *w, emu_queue queue) { (void)w, (void)queue; }
void emu_async_commit(emu_warp *w, emu_queue queue) { (void)w, (void)queue; }
void emu_async_wait(emu_warp *w, emu_queue queue, uint32_t pending) { (void)w, (void)queue, (void)pending; }
static uint64_t counts[EMU_C_COUNT];

int emu_unit_waits(emu_warp *w, uint32_t what) { return (void)w, (void)what, 1; }

void emu_count(emu_warp *w, emu_counter counter, uint64_t amount) {
    (void)w;
    counts[counter] += amount;
}

/* Bytes that tensor and bulk copies stored since the last call. */
uint32_t machine_stored(void) {
    uint64_t stored = counts[EMU_C_TMA_STORE_BYTES];
    counts[EMU_C_TMA_STORE_BYTES] = 0;
    return (uint32_t)stored;
}

/* Agent: the warp, or its twin. One warp's operations are ordered; others' never are. */
emu_stamp emu_now(emu_warp *w, uint32_t access) { return (emu_stamp){16 * w->cta->rank + 2 * w->index + (access & EMU_ASYNC ? 1u : 0u), 1}; }
int emu_ordered(emu_warp *w, emu_stamp stamp, uint32_t access) { return stamp.agent == emu_now(w, access).agent || relaxed_order; }

void tmem_take(emu_tmem *t, uint32_t columns) { emu_tmem_allocate(t, columns); }

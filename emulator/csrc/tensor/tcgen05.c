/* tcgen05: allocation of tensor memory, mma, commit, ld, st, cp. */
#include "units.h"

#include <stdlib.h>

#include "operand.h"
#include "product.h"

#define EMU_PAIR 2

/* Who touched tensor memory last, by blocks of 16 lanes and 8 columns. A tcgen05.st stays `pending`, ordered before nothing of
 * another agent, until its warp's wait::st. */
#define EMU_BLOCK_LANES 16
#define EMU_BLOCK_COLUMNS 8
#define EMU_READERS 4
#define EMU_PENDING 0xffffffffu

typedef struct {
    emu_stamp write, read[EMU_READERS];
    uint8_t asynchronous; /* the write was */
} touched;

typedef struct {
    emu_tmem memory; /* first: cta->tmem points here */
    touched block[EMU_TMEM_LANES / EMU_BLOCK_LANES][EMU_TMEM_COLUMNS / EMU_BLOCK_COLUMNS];
    uint32_t waiting; /* 1 + the warp that has allocated for its CTA of a pair and waits for the other CTA to do so */
} tensor_memory;

void *emu_tmem_new(emu_cta *cta) {
    (void)cta;
    return calloc(1, sizeof(tensor_memory));
}

void emu_tmem_free(emu_warp *w, void *tmem) {
    emu_tmem *t = tmem;
    if (t && t->allocations)
        for (int i = 0; i < EMU_TMEM_COLUMNS; i++)
            if (t->length[i])
                emu_finding(w, EMU_F_TMEM, "the CTA ends with %d columns of tensor memory at column %d not freed", t->length[i], i);
    free(t);
}

static emu_tmem *tmem_of(emu_cta *cta) {
    if (!cta->tmem) cta->tmem = emu_tmem_new(cta);
    return cta->tmem;
}

static int first_lane(uint32_t mask) { return __builtin_ctz(mask); }

/* A .sync.aligned instruction: whole warp, one value in all lanes. */
static int collective(emu_warp *w, uint32_t mask, emu_in32 value, const char *what) {
    w->lane = -1;
    if (mask != 0xffffffffu) {
        emu_finding(w, EMU_F_BARRIER, "%s needs all 32 threads of the warp, executed by mask 0x%08x", what, mask);
        return 0;
    }
    for (int lane = 1; value && lane < 32; lane++)
        if (value[lane] != value[0]) {
            emu_finding(w, EMU_F_OPERAND, "%s: 0x%x in lane 0, 0x%x in lane %d; it must be the same in all", what, value[0],
                        value[lane], lane);
            return 0;
        }
    return 1;
}

/* The CTAs that an instruction of a group acts on, by rank; 0 after a finding. */
static int group_ctas(emu_warp *w, int groups, emu_cta *out[EMU_PAIR]) {
    out[0] = w->cta;
    if (groups == 1) return 1;
    if (w->cta->cluster->size % 2) {
        emu_finding(w, EMU_F_OPERAND, "cta_group::2 in a cluster of %u CTAs has no pairs", w->cta->cluster->size);
        return 0;
    }
    out[0] = emu_cluster_cta(w, w->cta->rank & ~1u);
    out[1] = emu_cluster_cta(w, w->cta->rank | 1u);
    return out[0] && out[1];
}

static int ordered(emu_warp *w, emu_stamp s, uint32_t access) {
    if (!s.clock) return 1;
    if (s.clock == EMU_PENDING) return s.agent == emu_now(w, 0).agent && !(access & EMU_ASYNC);
    return emu_ordered(w, s, access);
}

static void note_reader(touched *b, emu_stamp now) {
    int at = 0;
    for (int i = 0; i < EMU_READERS; i++)
        if (b->read[i].agent == now.agent || !b->read[i].clock) {
            at = i;
            break;
        }
    b->read[at] = now;
}

/* Checks an access to the 16 lanes around `lane` against what was there before, and records it. */
static void touch(emu_warp *w, emu_cta *cta, uint32_t lane, uint32_t column, uint32_t columns, uint32_t access, const char *what) {
    tensor_memory *t = (tensor_memory *)tmem_of(cta);
    emu_stamp now = emu_now(w, access & EMU_ASYNC);
    for (uint32_t c = column / EMU_BLOCK_COLUMNS; c * EMU_BLOCK_COLUMNS < column + columns; c++) {
        touched *b = &t->block[lane / EMU_BLOCK_LANES][c];
        int race = !ordered(w, b->write, access);
        if (race)
            emu_finding(w, b->asynchronous ? EMU_F_ASYNC : EMU_F_RACE,
                        "%s touches lane %u, columns %u to %u of CTA %u's tensor memory; %s is not ordered before it", what, lane,
                        c * EMU_BLOCK_COLUMNS, c * EMU_BLOCK_COLUMNS + EMU_BLOCK_COLUMNS - 1, cta->rank,
                        b->write.clock == EMU_PENDING ? "a tcgen05.st without its wait"
                        : b->asynchronous             ? "an mma or cp that writes there"
                                                      : "a tcgen05.st");
        for (int i = 0; access & EMU_WRITE && i < EMU_READERS; i++)
            if (!race && !ordered(w, b->read[i], access)) {
                emu_finding(w, EMU_F_RACE, "%s overwrites lane %u, columns %u to %u of CTA %u's tensor memory, which another reads",
                            what, lane, c * EMU_BLOCK_COLUMNS, c * EMU_BLOCK_COLUMNS + EMU_BLOCK_COLUMNS - 1, cta->rank);
                race = 1;
            }
        if (access & EMU_WRITE) {
            memset(b, 0, sizeof *b);
            b->write = now;
            b->asynchronous = (access & EMU_ASYNC) != 0;
            if (!b->asynchronous) b->write.clock = EMU_PENDING;
        } else note_reader(b, now);
        if (race) return; /* one finding an instruction and lane group */
    }
}

static void forget(emu_cta *cta, uint32_t column, uint32_t columns) {
    tensor_memory *t = (tensor_memory *)tmem_of(cta);
    for (int i = 0; i < EMU_TMEM_LANES / EMU_BLOCK_LANES; i++)
        memset(&t->block[i][column / EMU_BLOCK_COLUMNS], 0, columns / EMU_BLOCK_COLUMNS * sizeof(touched));
}

/* A pair allocates collectively, each CTA in its own tensor memory: neither goes on before the other has executed it too. */
int emu_tcgen05_alloc(emu_warp *w, uint32_t mask, int groups, emu_in32 to, emu_in32 columns) {
    emu_tmem *t = tmem_of(w->cta);
    tensor_memory *own = (tensor_memory *)t;
    const char *error = emu_tmem_count_error(columns[0]);
    emu_cta *pair[EMU_PAIR];
    uint8_t *cell;
    int at;
    if (!collective(w, mask, columns, "tcgen05.alloc") || !group_ctas(w, groups, pair)) return 0;
    if (own->waiting != w->index + 1) {
        if (error) emu_finding(w, EMU_F_OPERAND, "tcgen05.alloc of %u columns: %s", columns[0], error);
        else if (t->relinquished) emu_finding(w, EMU_F_TMEM, "tcgen05.alloc after the CTA relinquished its permit");
        if (error || t->relinquished) return 0;
        at = emu_tmem_allocate(t, columns[0]);
        if (at < 0) return emu_unit_waits(w, EMU_FOR_TMEM);
        w->lane = 0;
        if (emu_aligned(w, to[0], 4, "the result of tcgen05.alloc") && (cell = emu_shared(w, to[0], 4, EMU_WRITE))) {
            uint32_t address = (uint32_t)at;
            memcpy(cell, &address, 4);
        }
        w->lane = -1;
        if (groups == 1) return 0;
        w->cta->pair_allocs++;
        own->waiting = w->index + 1;
    }
    if (pair[~w->cta->rank & 1]->pair_allocs < w->cta->pair_allocs) return emu_unit_waits(w, EMU_FOR_PEER_ALLOC);
    own->waiting = 0;
    return 0;
}

void emu_tcgen05_dealloc(emu_warp *w, uint32_t mask, int groups, emu_in32 address, emu_in32 columns) {
    const char *error;
    (void)groups;
    if (!collective(w, mask, address, "tcgen05.dealloc")) return;
    error = emu_tmem_release(tmem_of(w->cta), address[0], columns[0]);
    if (error) emu_finding(w, EMU_F_TMEM, "tcgen05.dealloc of 0x%08x, %u columns: %s", address[0], columns[0], error);
    for (uint32_t lane = 0; !error && lane < EMU_TMEM_LANES; lane += EMU_BLOCK_LANES)
        touch(w, w->cta, lane, emu_tmem_column(address[0]), columns[0], EMU_WRITE, "tcgen05.dealloc");
    if (!error) forget(w->cta, emu_tmem_column(address[0]), columns[0]);
}

void emu_tcgen05_relinquish(emu_warp *w, uint32_t mask, int groups) {
    (void)groups;
    if (collective(w, mask, 0, "tcgen05.relinquish_alloc_permit")) tmem_of(w->cta)->relinquished = 1;
}

/* Tensor memory that an instruction is about to use: allocated, and written if it is read. */
static int vetted(emu_warp *w, emu_cta *cta, uint32_t lane, uint32_t column, uint32_t columns, int read, const char *what) {
    emu_tmem *t = tmem_of(cta);
    if (!emu_tmem_owned(t, lane, column, columns)) {
        emu_finding(w, EMU_F_TMEM, "%s uses lane %u, columns %u to %u of CTA %u, which are not allocated", what, lane, column,
                    column + columns - 1, cta->rank);
        return 0;
    }
    int missing = read ? emu_tmem_unwritten(t, lane, column, columns) : -1;
    if (missing >= 0)
        emu_finding(w, EMU_F_UNINIT, "%s reads lane %u, column %d of CTA %u's tensor memory, which was never written", what, lane,
                    missing, cta->rank);
    return missing < 0;
}

/* One CTA's rows of A out of tensor memory, 32 bits a column; `half`: the lanes that hold it for the right columns. */
static int a_from_tmem(emu_warp *w, emu_cta *cta, uint32_t address, int rows, int groups, int half, const emu_instruction *i,
                       float *out) {
    emu_tmem *t = tmem_of(cta);
    uint32_t column = emu_tmem_column(address), columns = (uint32_t)(i->k * emu_format_bytes(i->a) / 4);
    for (int m = 0; m < rows; m++) {
        uint32_t lane = emu_row_lane(rows, groups, emu_tmem_lane(address), m) + (half ? 64u : 0u);
        if (!vetted(w, cta, lane, column, columns, 1, "operand A of tcgen05.mma")) return 0;
        if (m % EMU_BLOCK_LANES == 0) touch(w, cta, lane, column, columns, EMU_READ | EMU_ASYNC, "operand A of tcgen05.mma");
        for (uint32_t c = 0; c < columns; c++) {
            int per = i->k / (int)columns;
            float value[4];
            emu_unpack(i->a, (const uint8_t *)&t->cell[lane][column + c], per, value);
            for (int e = 0; e < per; e++) out[m * i->k + (int)c * per + e] = i->negate_a ? -value[e] : value[e];
        }
    }
    return 1;
}

/* Rows of D in consecutive lanes, `n` columns each, += rows of A times B. */
static void rows_product(emu_tmem *t, const emu_instruction *i, uint32_t lane, uint32_t column, int rows, int n, const float *a,
                         const float *b, int enable, int scale) {
    float wide[EMU_BLOCK_LANES][256];
    int in_place = i->d == EMU_S32 || (i->d == EMU_F32 && !scale);
    for (int r = 0; r < rows; r++) {
        uint32_t *row = &t->cell[lane + (uint32_t)r][column];
        if (!enable) memset(in_place ? (void *)row : wide[r], 0, (size_t)n * 4);
        for (int c = 0; !in_place && enable && c < n; c++) {
            wide[r][c] = i->d == EMU_F16 ? emu_from_f16((uint16_t)row[c]) : emu_bits_f32(row[c]);
            if (scale) wide[r][c] *= emu_bits_f32((uint32_t)(127 - scale) << 23);
        }
    }
    if (i->d == EMU_S32)
        emu_product_s32((int32_t *)&t->cell[lane][column], EMU_TMEM_PITCH, a, i->k, b, i->n, rows, n, i->k, i->saturate);
    else if (in_place)
        emu_product((float *)&t->cell[lane][column], EMU_TMEM_PITCH, a, i->k, b, i->n, rows, n, i->k);
    else emu_product(wide[0], 256, a, i->k, b, i->n, rows, n, i->k);
    for (int r = 0; !in_place && r < rows; r++)
        for (int c = 0; c < n; c++)
            t->cell[lane + (uint32_t)r][column + (uint32_t)c] =
                i->d == EMU_F16 ? emu_to_f16(wide[r][c]) : emu_f32_bits(wide[r][c]);
}

/* One CTA's part of D. `part`: its index in the group; left[half]: A as the lanes of the left and the right columns see it. */
static void mma_part(emu_warp *w, emu_cta *cta, int part, int groups, const emu_instruction *i, uint32_t d,
                     const float *const left[2], const float *right, const uint32_t *disabled, int enable, int scale) {
    emu_tmem *t = tmem_of(cta);
    int rows = i->m / groups, halves = emu_split_columns(rows, groups) ? 2 : 1, n = i->n / halves;
    uint32_t column = emu_tmem_column(d);
    for (int half = 0; half < halves; half++)
        for (int m = 0; m < rows; m += EMU_BLOCK_LANES) { /* 16 rows lie in consecutive lanes in every layout */
            uint32_t lane = emu_row_lane(rows, groups, emu_tmem_lane(d), m) + 64u * (uint32_t)half;
            uint32_t off = disabled ? disabled[4 * part + (int)lane / 32] >> lane % 32 & 0xffff : 0;
            int run = off ? 1 : EMU_BLOCK_LANES;
            touch(w, cta, lane, column, (uint32_t)n, EMU_WRITE | EMU_ASYNC, "the accumulator of tcgen05.mma");
            for (int r = 0; r < EMU_BLOCK_LANES; r += run) {
                if (off >> r & 1) continue;
                for (int v = r; v < r + run; v++) {
                    if (!vetted(w, cta, lane + (uint32_t)v, column, (uint32_t)n, enable, "the accumulator of tcgen05.mma")) return;
                    emu_tmem_mark(t, lane + (uint32_t)v, column, (uint32_t)n);
                }
                rows_product(t, i, lane + (uint32_t)r, column, run, n, left[half] + (m + r) * i->k, right + half * n, enable, scale);
            }
        }
}

static const char *accumulator_error(const emu_instruction *i, int groups, uint32_t d) {
    uint32_t lane = emu_tmem_lane(d);
    if (i->m == 64 && groups == 1) return lane == 0 || lane == 16 ? 0 : "an accumulator of 64 rows starts at lane 0 or 16";
    return lane ? "the accumulator starts at lane 0" : 0;
}

static void mma(emu_warp *w, int groups, emu_kind kind, uint32_t d, emu_in64 a_desc, uint32_t a_address, uint64_t b_desc,
                uint32_t instruction, const uint32_t *disabled, int enable, int scale) {
    static __thread float left[EMU_PAIR][2][128 * 32], right[32 * 256];
    emu_cta *ctas[EMU_PAIR];
    emu_instruction i;
    emu_descriptor a, b;
    const char *error = emu_decode_instruction(instruction, kind, groups, &i);
    if (error) {
        emu_finding(w, EMU_F_DESCRIPTOR, "instruction descriptor 0x%08x: %s", instruction, error);
        return;
    }
    if (a_desc && (error = emu_decode_tcgen05_descriptor(*a_desc, &a))) {
        emu_finding(w, EMU_F_DESCRIPTOR, "descriptor of A 0x%016llx: %s", (unsigned long long)*a_desc, error);
        return;
    }
    if ((error = emu_decode_tcgen05_descriptor(b_desc, &b))) {
        emu_finding(w, EMU_F_DESCRIPTOR, "descriptor of B 0x%016llx: %s", (unsigned long long)b_desc, error);
        return;
    }
    if ((error = accumulator_error(&i, groups, d))) {
        emu_finding(w, EMU_F_TMEM, "tcgen05.mma to 0x%08x: %s", d, error);
        return;
    }
    if (!a_desc && i.mn_major_a) {
        emu_finding(w, EMU_F_DESCRIPTOR, "operand A in tensor memory is K-major");
        return;
    }
    if (!group_ctas(w, groups, ctas)) return;
    emu_async_begin(w, EMU_TWIN_TCGEN05);
    int rows = i.m / groups, columns = i.n / groups;
    for (int p = 0; p < groups; p++) {
        emu_gather_shared(w, ctas[p], &b, i.mn_major_b, 0, columns, i.k, i.b, i.negate_b, right + p * columns, 1, i.n);
        if (a_desc) emu_gather_shared(w, ctas[p], &a, i.mn_major_a, 0, rows, i.k, i.a, i.negate_a, left[p][0], i.k, 1);
        else if (!a_from_tmem(w, ctas[p], a_address, rows, groups, 0, &i, left[p][0])) return;
        else if (emu_split_columns(rows, groups) && !a_from_tmem(w, ctas[p], a_address, rows, groups, 1, &i, left[p][1])) return;
    }
    for (int p = 0; p < groups; p++) {
        const float *const sides[2] = {left[p][0], a_desc ? left[p][0] : left[p][1]};
        mma_part(w, ctas[p], p, groups, &i, d, sides, right, disabled, enable, scale);
    }
    emu_count(w, EMU_C_MATRIX_FLOPS, 2ull * (uint64_t)i.m * (uint64_t)i.n * (uint64_t)i.k);
}

void emu_tcgen05_mma(emu_warp *w, uint32_t mask, int groups, emu_kind kind, emu_in32 d, emu_in64 a_desc, emu_in32 a_address,
                     emu_in64 b_desc, emu_in32 instruction, emu_in32 const *disabled, emu_in32 enable, int scale) {
    for (uint32_t left = mask; left; left &= left - 1) {
        int lane = first_lane(left);
        uint32_t lanes[8];
        for (int i = 0; disabled && i < 4 * groups; i++) lanes[i] = disabled[i][lane];
        w->lane = lane;
        mma(w, groups, kind, d[lane], a_desc ? a_desc + lane : 0, a_address ? a_address[lane] : 0, b_desc[lane],
            instruction[lane], disabled ? lanes : 0, enable[lane] != 0, scale);
    }
    w->lane = -1;
}

void emu_tcgen05_commit(emu_warp *w, uint32_t mask, int groups, emu_in32 mbarrier, emu_in32 multicast) {
    (void)groups;
    for (uint32_t left = mask; left; left &= left - 1) {
        int lane = first_lane(left);
        w->lane = lane;
        if (!multicast) {
            emu_mbar_arrive_async(w, mbarrier[lane], 1);
            continue;
        }
        for (uint32_t rest = multicast[lane] & 0xffff; rest; rest &= rest - 1)
            emu_mbar_arrive_async(
                w, (uint32_t)first_lane(rest) << EMU_SHARED_RANK_SHIFT | (mbarrier[lane] & ((1u << EMU_SHARED_RANK_SHIFT) - 1)), 1);
    }
    w->lane = -1;
}

/* ---- ld and st */
typedef struct {
    emu_ld_shape shape;
    uint32_t lane, column; /* of the address */
    int registers, split, per; /* per: cells in a register, 2 when 16-bit values are packed */
} span;

/* What a warp's ld or st touches; 0 after a finding. */
static int ld_span(emu_warp *w, uint32_t mask, emu_ld_shape shape, int num, int pack, emu_in32 address, int split, int read,
                   const char *what, span *s) {
    static const int columns[5] = {1, 2, 4, 8, 1};
    int rows = shape == EMU_LD_32X32B ? 32 : 16, width = columns[shape] * num * (pack ? 2 : 1);
    if (!collective(w, mask, address, what)) return 0;
    *s = (span){shape, emu_tmem_lane(address[0]), emu_tmem_column(address[0]), emu_ld_registers(shape, num), split, pack ? 2 : 1};
    if (s->lane / 32 != w->index % 4 || s->lane % (uint32_t)rows) {
        emu_finding(w, EMU_F_TMEM, "%s at lane %u by warp %u: it may use lanes %u to %u, at multiples of %d", what, s->lane,
                    w->index, w->index % 4 * 32, w->index % 4 * 32 + 31, rows);
        return 0;
    }
    for (int half = 0; half < (shape == EMU_LD_16X32BX2 ? 2 : 1); half++)
        for (int row = 0; row < rows; row++) {
            uint32_t lane = s->lane + (uint32_t)row, column = s->column + (uint32_t)(half * split);
            if (!vetted(w, w->cta, lane, column, (uint32_t)width, read, what)) return 0;
            if (row % EMU_BLOCK_LANES == 0)
                touch(w, w->cta, lane, column, (uint32_t)width, read ? EMU_READ : EMU_WRITE, what);
        }
    return 1;
}

/* The first cell of a register: column c of the shape is cells c * per onwards. */
static void cell_of(const span *s, int r, int lane, uint32_t *row, uint32_t *column) {
    int dr, dc;
    emu_ld_cell(s->shape, r, lane, 0, &dr, &dc);
    *row = s->lane + (uint32_t)dr;
    *column = s->column + (uint32_t)(dc * s->per) + (s->shape == EMU_LD_16X32BX2 && lane >= 16 ? (uint32_t)s->split : 0u);
}

void emu_tcgen05_ld(emu_warp *w, uint32_t mask, emu_ld_shape shape, int num, int pack, emu_out32 const *out, emu_in32 address,
                    int split) {
    emu_tmem *t = tmem_of(w->cta);
    span s;
    uint32_t row, column;
    if (!ld_span(w, mask, shape, num, pack, address, split, 1, "tcgen05.ld", &s)) {
        for (int r = 0; r < emu_ld_registers(shape, num); r++) memset(out[r], 0, 32 * sizeof(uint32_t));
        return;
    }
    for (int r = 0; r < s.registers; r++)
        for (int lane = 0; lane < 32; lane++) {
            cell_of(&s, r, lane, &row, &column);
            if (!lane) emu_flight_start(w, out[r], EMU_FLIGHT_LD);
            out[r][lane] = pack ? (t->cell[row][column] & 0xffff) | t->cell[row][column + 1] << 16 : t->cell[row][column];
        }
}

void emu_tcgen05_st(emu_warp *w, uint32_t mask, emu_ld_shape shape, int num, int unpack, emu_in32 const *in, emu_in32 address,
                    int split) {
    emu_tmem *t = tmem_of(w->cta);
    span s;
    uint32_t row, column;
    if (!ld_span(w, mask, shape, num, unpack, address, split, 0, "tcgen05.st", &s)) return;
    for (int r = 0; r < s.registers; r++)
        for (int lane = 0; lane < 32; lane++) {
            cell_of(&s, r, lane, &row, &column);
            t->cell[row][column] = unpack ? in[r][lane] & 0xffff : in[r][lane];
            if (unpack) t->cell[row][column + 1] = in[r][lane] >> 16;
            emu_tmem_mark(t, row, column, (uint32_t)s.per);
        }
}

void emu_tcgen05_wait_ld(emu_warp *w, uint32_t mask) {
    if (collective(w, mask, 0, "tcgen05.wait::ld")) emu_flight_loaded(w);
}

void emu_tcgen05_wait_st(emu_warp *w, uint32_t mask) {
    tensor_memory *t = (tensor_memory *)tmem_of(w->cta);
    emu_stamp now = emu_now(w, 0);
    if (!collective(w, mask, 0, "tcgen05.wait::st")) return;
    for (size_t i = 0; i < sizeof t->block / sizeof(touched); i++) {
        touched *b = &t->block[0][0] + i;
        if (b->write.clock == EMU_PENDING && b->write.agent == now.agent) b->write = now;
    }
}

/* ---- cp: rows of 16-byte pieces, K-major, each to one or more lanes */
static void cp_part(emu_warp *w, emu_cta *cta, emu_cp_shape shape, uint32_t address, const emu_descriptor *d) {
    static const int rows_of[] = {128, 128, 64, 64, 32};
    emu_tmem *t = tmem_of(cta);
    int pieces = shape == EMU_CP_128X256B ? 2 : 1, rows = rows_of[shape], copies = 128 / rows;
    uint32_t column = emu_tmem_column(address);
    for (int row = 0; row < rows; row++)
        for (int copy = 0; copy < copies; copy++) {
            /* 32x128b: to all four warps' lanes. 02_13: to lanes row and row + 64. 01_23: 32 rows to warps 0 and 1, the next to
             * 2 and 3. */
            uint32_t lane = emu_tmem_lane(address) + (uint32_t)(shape == EMU_CP_64X128B_02_13   ? row + 64 * copy
                                                                : shape == EMU_CP_64X128B_01_23 ? row % 32 + row / 32 * 64 + 32 * copy
                                                                                                : row + rows * copy);
            if (!vetted(w, cta, lane, column, (uint32_t)pieces * 4, 0, "tcgen05.cp")) return;
            if (row % EMU_BLOCK_LANES == 0)
                touch(w, cta, lane, column, (uint32_t)pieces * 4, EMU_WRITE | EMU_ASYNC, "tcgen05.cp");
            for (int p = 0; p < pieces; p++) {
                uint32_t at = emu_piece_address(d, 0, (uint32_t)p, (uint32_t)row);
                const uint8_t *from = emu_shared(w, cta->rank << EMU_SHARED_RANK_SHIFT | at, 16, EMU_READ | EMU_ASYNC);
                if (!from) return;
                memcpy(&t->cell[lane][column + 4 * (uint32_t)p], from, 16);
                emu_tmem_mark(t, lane, column + 4 * (uint32_t)p, 4);
            }
        }
}

void emu_tcgen05_cp(emu_warp *w, uint32_t mask, int groups, emu_cp_shape shape, emu_in32 address, emu_in64 descriptor) {
    for (uint32_t left = mask; left; left &= left - 1) {
        int lane = first_lane(left);
        emu_cta *ctas[EMU_PAIR];
        emu_descriptor d;
        const char *error = emu_decode_tcgen05_descriptor(descriptor[lane], &d);
        w->lane = lane;
        if (error) emu_finding(w, EMU_F_DESCRIPTOR, "descriptor 0x%016llx: %s", (unsigned long long)descriptor[lane], error);
        if (error || !group_ctas(w, groups, ctas)) continue;
        emu_async_begin(w, EMU_TWIN_TCGEN05);
        for (int p = 0; p < groups; p++) cp_part(w, ctas[p], shape, address[lane], &d);
    }
    w->lane = -1;
}

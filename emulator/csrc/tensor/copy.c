/* Tensor (TMA) and bulk copies between global and shared memory. */
#include "units.h"

#include "tensor_map.h"

#define EMU_BOX_ROW 2048 /* 256 elements of 8 bytes */

static uint32_t of_rank(uint32_t rank, uint32_t address) {
    return rank << EMU_SHARED_RANK_SHIFT | (address & ((1u << EMU_SHARED_RANK_SHIFT) - 1));
}

/* The map that an operand names, decoded; 0 after a finding. */
static int tensor_map(emu_warp *w, uint64_t address, int rank, emu_tensor_map *t) {
    const uint8_t *bytes;
    const char *error;
    if (!emu_aligned(w, address, 64, "a tensor map")) return 0;
    if (!(bytes = emu_generic_read(w, address, 64))) return 0;
    if ((error = emu_decode_tensor_map(bytes, t))) emu_finding(w, EMU_F_DESCRIPTOR, "tensor map: %s", error);
    else if (t->rank != rank) emu_finding(w, EMU_F_DESCRIPTOR, "a %dd copy with a tensor map of rank %d", rank, t->rank);
    return !error && t->rank == rank;
}

static void coordinates(emu_in32 const *at, int rank, int lane, int32_t *out) {
    for (int i = 0; i < rank; i++) out[i] = (int32_t)at[i][lane];
}

/* One destination of a load, `again` if not the first: the box into shared memory at `to`. Returns the bytes read from global memory. */
static uint64_t load_box(emu_warp *w, const emu_tensor_map *t, const int32_t *at, uint32_t to, uint32_t again) {
    uint8_t row_bytes[EMU_BOX_ROW];
    uint32_t width = (uint32_t)(t->box[0] * t->element), window = to & ((1u << EMU_SHARED_RANK_SHIFT) - 1);
    uint64_t read = 0;
    emu_box_walk walk;
    emu_box_row row;
    /* The swizzle permutes bytes inside each row of the box, so the box as a whole is one range. */
    uint8_t *box = emu_shared(w, to, emu_tensor_map_bytes(t), EMU_WRITE | EMU_ASYNC);
    if (!box) return 0;
    emu_box_start(&walk, t, at);
    while (emu_box_next(&walk, &row)) {
        uint32_t low = (uint32_t)(row.first * t->element), high = (uint32_t)(row.last * t->element);
        const uint8_t *from = high > low ? emu_global(w, row.global + low, high - low, EMU_READ | EMU_ASYNC | again) : 0;
        emu_tensor_map_fill(t, row_bytes, (int)width);
        if (from) memcpy(row_bytes + low, from, high - low);
        read += high - low;
        if (!t->swizzle) memcpy(box + row.offset, row_bytes, width);
        else
            for (uint32_t i = 0; i < width; i += 16)
                memcpy(box + (emu_tensor_map_swizzle(t, window + row.offset + i) - window), row_bytes + i, 16);
    }
    return read;
}

void emu_tma_load(emu_warp *w, uint32_t mask, int rank, int groups, emu_in32 to, emu_in64 map, emu_in32 const *at,
                  emu_in32 mbarrier, emu_in32 multicast) {
    for (uint32_t left = mask; left; left &= left - 1) {
        int lane = __builtin_ctz(left);
        emu_tensor_map t;
        int32_t c[5];
        w->lane = lane;
        if (!tensor_map(w, map[lane], rank, &t)) continue;
        if (!emu_aligned(w, to[lane], 128, "a tensor copy's shared memory")) continue;
        coordinates(at, rank, lane, c);
        emu_async_begin(w, EMU_TWIN_MBAR(mbarrier[lane]));
        if (!multicast) {
            emu_count(w, EMU_C_TMA_LOAD_BYTES, load_box(w, &t, c, to[lane], 0));
            emu_mbar_complete_tx(w, mbarrier[lane], emu_tensor_map_bytes(&t));
            continue;
        }
        uint64_t read = 0;
        for (uint32_t rest = multicast[lane] & 0xffff; rest; rest &= rest - 1) {
            uint32_t r = (uint32_t)__builtin_ctz(rest);
            /* The signal goes to the same offset in the destination CTA; for a pair, to the one of the pair that the operand
             * names by its parity. */
            uint32_t parity = mbarrier[lane] >> EMU_SHARED_RANK_SHIFT & 1, signal = groups == 2 ? (r & ~1u) | parity : r;
            read = load_box(w, &t, c, of_rank(r, to[lane]), rest == (multicast[lane] & 0xffff) ? 0 : EMU_AGAIN);
            emu_mbar_complete_tx(w, of_rank(signal, mbarrier[lane]), emu_tensor_map_bytes(&t));
        }
        emu_count(w, EMU_C_TMA_LOAD_BYTES, read);
    }
    w->lane = -1;
}

void emu_tma_prefetch(emu_warp *w, uint32_t mask, int rank, emu_in64 map, emu_in32 const *at) {
    (void)at;
    for (uint32_t left = mask; left; left &= left - 1) {
        int lane = __builtin_ctz(left);
        emu_tensor_map t;
        w->lane = lane;
        tensor_map(w, map[lane], rank, &t);
    }
    w->lane = -1;
}

/* ---- reductions */
static uint16_t to_bf16(float f) {
    uint32_t u = emu_f32_bits(f);
    if ((u & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
    return (uint16_t)((u + 0x7fffu + (u >> 16 & 1)) >> 16);
}

static float pick(float a, float b, emu_reduction r) { /* min and max ignore one NaN */
    if (a != a) return b;
    if (b != b) return a;
    return (r == EMU_REDUCE_MIN) == (a < b) ? a : b;
}

static const char *reduction_error(emu_reduction r, emu_reduced_type type) {
    int bitwise = r == EMU_REDUCE_AND || r == EMU_REDUCE_OR || r == EMU_REDUCE_XOR;
    if (bitwise && type >= EMU_R_F16) return "bitwise reductions take integers";
    if (type >= EMU_R_F32 && r != EMU_REDUCE_ADD) return "f32 and f64 only add";
    return 0;
}

#define EMU_INTEGER(T, U)                                                                          \
    {                                                                                              \
        T a, b, out;                                                                               \
        memcpy(&a, to, sizeof a);                                                                  \
        memcpy(&b, from, sizeof b);                                                                \
        out = r == EMU_REDUCE_ADD ? (T)((U)a + (U)b)                                               \
            : r == EMU_REDUCE_MIN ? (a < b ? a : b)                                                \
            : r == EMU_REDUCE_MAX ? (a > b ? a : b)                                                \
            : r == EMU_REDUCE_AND ? (T)(a & b)                                                     \
            : r == EMU_REDUCE_OR  ? (T)(a | b)                                                     \
                                  : (T)(a ^ b);                                                    \
        memcpy(to, &out, sizeof out);                                                              \
        return;                                                                                    \
    }

/* *to = *to op *from, one element. */
static void reduce(emu_reduction r, emu_reduced_type type, uint8_t *to, const uint8_t *from) {
    switch (type) {
    case EMU_R_U32: EMU_INTEGER(uint32_t, uint32_t)
    case EMU_R_S32: EMU_INTEGER(int32_t, uint32_t)
    case EMU_R_U64: EMU_INTEGER(uint64_t, uint64_t)
    case EMU_R_S64: EMU_INTEGER(int64_t, uint64_t)
    case EMU_R_F16:
    case EMU_R_BF16: {
        uint16_t ha, hb, out;
        float a, b, f;
        memcpy(&ha, to, 2);
        memcpy(&hb, from, 2);
        a = type == EMU_R_F16 ? emu_from_f16(ha) : emu_from_bf16(ha);
        b = type == EMU_R_F16 ? emu_from_f16(hb) : emu_from_bf16(hb);
        f = r == EMU_REDUCE_ADD ? a + b : pick(a, b, r);
        out = type == EMU_R_F16 ? emu_to_f16(f) : to_bf16(f);
        memcpy(to, &out, 2);
        return;
    }
    case EMU_R_F32: {
        float a, b;
        memcpy(&a, to, 4);
        memcpy(&b, from, 4);
        a += b;
        memcpy(to, &a, 4);
        return;
    }
    case EMU_R_F64: {
        double a, b;
        memcpy(&a, to, 8);
        memcpy(&b, from, 8);
        a += b;
        memcpy(to, &a, 8);
        return;
    }
    }
}

static int reduced_bytes(emu_reduced_type type) {
    static const int bytes[] = {4, 4, 8, 8, 2, 2, 4, 8};
    return bytes[type];
}

static void move(emu_reduction r, emu_reduced_type type, uint8_t *to, const uint8_t *from, uint32_t bytes) {
    if (r == EMU_REDUCE_NONE) memcpy(to, from, bytes);
    else
        for (uint32_t i = 0; i < bytes; i += (uint32_t)reduced_bytes(type)) reduce(r, type, to + i, from + i);
}

static uint32_t global_access(emu_reduction r) {
    return EMU_ASYNC | EMU_WRITE | (r == EMU_REDUCE_NONE ? 0u : EMU_READ | EMU_ATOMIC);
}

/* The type that a tensor map's format reduces in; -1: none. */
static int map_type(int format) {
    switch (format) {
    case 2: return EMU_R_U32;
    case 3: return EMU_R_S32;
    case 4: return EMU_R_U64;
    case 5: return EMU_R_S64;
    case 6: return EMU_R_F16;
    case 7:
    case 8: return EMU_R_F32;
    case 9: return EMU_R_F64;
    case 10: return EMU_R_BF16;
    default: return -1;
    }
}

/* One row of a box out of shared memory, only what lies inside the tensor. */
static void store_row(emu_warp *w, const emu_tensor_map *t, const emu_box_row *row, uint32_t from, emu_reduction reduction,
                      emu_reduced_type type) {
    uint8_t bytes[EMU_BOX_ROW], *to;
    uint32_t low = (uint32_t)(row->first * t->element), high = (uint32_t)(row->last * t->element);
    uint32_t rank = from & ~((1u << EMU_SHARED_RANK_SHIFT) - 1), window = from & ((1u << EMU_SHARED_RANK_SHIFT) - 1);
    if (high == low) return;
    for (uint32_t i = low & ~15u; i < high; i += 16) {
        uint32_t begin = i < low ? low - i : 0, end = high - i < 16 ? high - i : 16;
        uint32_t at = rank | emu_tensor_map_swizzle(t, window + row->offset + i);
        const uint8_t *piece = emu_shared(w, at + begin, end - begin, EMU_READ | EMU_ASYNC);
        if (!piece) return;
        memcpy(bytes + i + begin, piece, end - begin);
    }
    to = emu_global(w, row->global + low, high - low, global_access(reduction));
    if (to) move(reduction, type, to, bytes + low, high - low);
    emu_count(w, EMU_C_TMA_STORE_BYTES, high - low);
}

/* Lanes with the operands of an earlier lane drop out of a plain store: the copy instruction is executed once for a warp whose
 * lanes agree, and published kernels issue it without electing a lane. */
static uint32_t distinct(uint32_t mask, int rank, emu_in64 map, emu_in32 const *at, emu_in32 from) {
    uint32_t kept = mask;
    for (uint32_t left = mask; left; left &= left - 1)
        for (uint32_t before = kept & ((1u << __builtin_ctz(left)) - 1); before; before &= before - 1) {
            int lane = __builtin_ctz(left), other = __builtin_ctz(before);
            int same = map[lane] == map[other] && from[lane] == from[other];
            for (int i = 0; i < rank; i++) same = same && at[i][lane] == at[i][other];
            if (!same) continue;
            kept &= ~(1u << lane);
            break;
        }
    return kept;
}

void emu_tma_store(emu_warp *w, uint32_t mask, int rank, emu_reduction reduction, emu_in64 map, emu_in32 const *at,
                   emu_in32 from) {
    uint32_t lanes = reduction == EMU_REDUCE_NONE ? distinct(mask, rank, map, at, from) : mask;
    for (uint32_t left = lanes; left; left &= left - 1) {
        int lane = __builtin_ctz(left), type;
        emu_tensor_map t;
        emu_box_walk walk;
        emu_box_row row;
        int32_t c[5];
        w->lane = lane;
        if (!tensor_map(w, map[lane], rank, &t)) continue;
        if (!emu_aligned(w, from[lane], 128, "a tensor copy's shared memory")) continue;
        type = map_type(t.format);
        if (reduction != EMU_REDUCE_NONE && (type < 0 || reduction_error(reduction, (emu_reduced_type)type))) {
            emu_finding(w, EMU_F_DESCRIPTOR, "this reduction is not defined for the tensor map's format %d", t.format);
            continue;
        }
        coordinates(at, rank, lane, c);
        emu_async_begin(w, EMU_TWIN_BULK);
        emu_box_start(&walk, &t, c);
        while (emu_box_next(&walk, &row)) store_row(w, &t, &row, from[lane], reduction, (emu_reduced_type)type);
        emu_async_join(w, EMU_Q_BULK);
    }
    w->lane = -1;
}

/* ---- bulk copies */
static int bulk_operands(emu_warp *w, uint64_t a, uint64_t b, uint32_t bytes) {
    if (!emu_aligned(w, a, 16, "a bulk copy's destination") || !emu_aligned(w, b, 16, "a bulk copy's source")) return 0;
    if (bytes % 16) emu_finding(w, EMU_F_OPERAND, "a bulk copy of %u bytes; it must be a multiple of 16", bytes);
    return bytes % 16 == 0;
}

void emu_bulk_load(emu_warp *w, uint32_t mask, emu_in32 to, emu_in64 from, emu_in32 bytes, emu_in32 mbarrier,
                   emu_in32 multicast) {
    for (uint32_t left = mask; left; left &= left - 1) {
        int lane = __builtin_ctz(left);
        uint32_t n = bytes[lane];
        const uint8_t *source;
        w->lane = lane;
        if (!bulk_operands(w, to[lane], from[lane], n)) continue;
        emu_async_begin(w, EMU_TWIN_MBAR(mbarrier[lane]));
        source = n ? emu_global(w, from[lane], n, EMU_READ | EMU_ASYNC) : 0;
        uint32_t own = to[lane] >> EMU_SHARED_RANK_SHIFT;
        for (uint32_t rest = multicast ? multicast[lane] & 0xffff : 1u << own; rest; rest &= rest - 1) {
            uint32_t r = (uint32_t)__builtin_ctz(rest);
            uint8_t *target = n ? emu_shared(w, of_rank(r, to[lane]), n, EMU_WRITE | EMU_ASYNC) : 0;
            if (target && source) memcpy(target, source, n);
            emu_mbar_complete_tx(w, multicast ? of_rank(r, mbarrier[lane]) : mbarrier[lane], n);
        }
        emu_count(w, EMU_C_TMA_LOAD_BYTES, n);
    }
    w->lane = -1;
}

void emu_bulk_store(emu_warp *w, uint32_t mask, emu_in64 to, emu_in32 from, emu_in32 bytes, emu_reduction reduction,
                    emu_reduced_type type) {
    const char *error = reduction == EMU_REDUCE_NONE ? 0 : reduction_error(reduction, type);
    for (uint32_t left = mask; left; left &= left - 1) {
        int lane = __builtin_ctz(left);
        uint32_t n = bytes[lane];
        w->lane = lane;
        if (error) emu_finding(w, EMU_F_OPERAND, "%s", error);
        if (error || !bulk_operands(w, to[lane], from[lane], n)) continue;
        emu_async_begin(w, EMU_TWIN_BULK);
        if (n) {
            const uint8_t *source = emu_shared(w, from[lane], n, EMU_READ | EMU_ASYNC);
            uint8_t *target = emu_global(w, to[lane], n, global_access(reduction));
            if (source && target) move(reduction, type, target, source, n);
        }
        emu_async_join(w, EMU_Q_BULK);
        emu_count(w, EMU_C_TMA_STORE_BYTES, n);
    }
    w->lane = -1;
}

void emu_bulk_dsmem(emu_warp *w, uint32_t mask, emu_in32 to, emu_in32 from, emu_in32 bytes, emu_in32 mbarrier) {
    for (uint32_t left = mask; left; left &= left - 1) {
        int lane = __builtin_ctz(left);
        uint32_t n = bytes[lane];
        w->lane = lane;
        if (!bulk_operands(w, to[lane], from[lane], n)) continue;
        emu_async_begin(w, EMU_TWIN_MBAR(mbarrier[lane]));
        if (n) {
            const uint8_t *source = emu_shared(w, from[lane], n, EMU_READ | EMU_ASYNC);
            uint8_t *target = emu_shared(w, to[lane], n, EMU_WRITE | EMU_ASYNC);
            if (source && target) memcpy(target, source, n);
        }
        emu_mbar_complete_tx(w, mbarrier[lane], n);
    }
    w->lane = -1;
}

void emu_bulk_commit(emu_warp *w, uint32_t mask) {
    /* Groups belong to threads; the machine keeps them by warp, and one thread of a warp issues bulk copies. */
    if (mask) emu_async_commit(w, EMU_Q_BULK);
}

void emu_bulk_wait(emu_warp *w, uint32_t mask, int pending) {
    if (mask) emu_async_wait(w, EMU_Q_BULK, (uint32_t)pending);
}

/* The 128-byte tensor map, as far as its bits are known, and the walk over one box of it (tiled mode).
 *
 * Only the first 64 bytes carry information. A box row (dimension 0) is contiguous in global memory and in shared memory;
 * rows follow each other densely in shared memory and the whole is XOR-swizzled by address bits. */
#ifndef EMU_TENSOR_TENSOR_MAP_H
#define EMU_TENSOR_TENSOR_MAP_H

#include <stdint.h>
#include <string.h>

typedef enum { EMU_ATOM_16B, EMU_ATOM_32B, EMU_ATOM_32B_FLIP_8B, EMU_ATOM_64B } emu_atomicity;

typedef struct {
    uint64_t address;
    int rank, format, element; /* element: bytes */
    int interleave, swizzle;   /* swizzle: 0 none, 1 32B, 2 64B, 3 128B */
    int fill_nan, tf32, atomicity;
    uint64_t stride[5]; /* bytes; stride[0] is the element */
    int64_t dim[5];
    int box[5], element_stride[5];
} emu_tensor_map;

/* Bytes of one element of each format code; 0: not modelled. */
static inline int emu_tensor_map_element(int format) {
    static const int8_t bytes[16] = {1, 2, 4, 4, 8, 8, 2, 4, 4, 8, 2, 0, 0, 0, 0, 0};
    return bytes[format & 15];
}

/* Returns NULL or what is wrong. */
static inline const char *emu_decode_tensor_map(const uint8_t *map, emu_tensor_map *t) {
    uint32_t w[16];
    memcpy(w, map, 64);
    memset(t, 0, sizeof *t);
    memcpy(&t->address, map, 8);
    t->rank = (int)(w[2] >> 4 & 7) + 1;
    t->format = (int)(w[2] >> 7 & 15);
    t->interleave = (int)(w[2] >> 11 & 3);
    t->swizzle = (int)(w[2] >> 13 & 3);
    t->fill_nan = (int)(w[2] >> 15 & 1);
    t->tf32 = (int)(w[2] >> 16 & 1);
    t->atomicity = (int)(w[2] >> 19 & 3);
    if (!(w[2] >> 1 & 1)) return "this is no tensor map (bit 1 of byte 8 is clear)";
    if (t->rank > 5) return "the rank exceeds 5";
    t->element = emu_tensor_map_element(t->format);
    if (!t->element) return "sub-byte packed formats are not modelled";
    if (t->interleave) return "interleaved layouts are not modelled";
    if (t->tf32) return "tf32 conversion by the copy is not modelled";
    if (t->atomicity == EMU_ATOM_32B_FLIP_8B) return "the swizzle with 8-byte flips is not modelled";
    if (t->atomicity && t->swizzle != 3) return "a swizzle atomicity other than 16 bytes needs the 128-byte swizzle";
    t->stride[0] = (uint64_t)t->element;
    for (int i = 0; i < 4; i++) {
        uint64_t high = w[7] >> (4 * i) & 15;
        t->stride[i + 1] = (high << 32 | w[3 + i]) << 4;
    }
    for (int i = 0; i < 5; i++) {
        t->dim[i] = i < t->rank ? (int64_t)w[8 + i] + 1 : 1;
        t->element_stride[i] = i < t->rank ? (int)(w[13] >> (3 * i) & 7) + 1 : 1;
        t->box[i] = i < t->rank ? (int)map[0x37 + i] + 1 : 1;
    }
    if (t->element_stride[0] != 1) return "an element stride in dimension 0 needs an interleaved layout";
    if (t->address & 15) return "the tensor's address is not a multiple of 16";
    int row = t->box[0] * t->element;
    if (row & 15) return "a box row is not a multiple of 16 bytes";
    if (t->swizzle && row > 16 << t->swizzle) return "a box row exceeds the swizzle span";
    if (t->swizzle && row < 16 << t->swizzle) return "a box row shorter than the swizzle span is not modelled";
    return 0;
}

/* The shared-memory address that holds the byte which would lie at `address` without swizzle. */
static inline uint32_t emu_tensor_map_swizzle(const emu_tensor_map *t, uint32_t address) {
    uint32_t row = address >> 7;
    switch (t->swizzle) {
    case 1: return address ^ (row & 1u) << 4;
    case 2: return address ^ (row & 3u) << 4;
    case 3:
        if (t->atomicity == EMU_ATOM_32B) return address ^ (row & 3u) << 5;
        if (t->atomicity == EMU_ATOM_64B) return address ^ (row & 1u) << 6;
        return address ^ (row & 7u) << 4;
    default: return address;
    }
}

static inline int emu_tensor_map_count(const emu_tensor_map *t, int i) { /* elements along dimension i of the box */
    return (t->box[i] + t->element_stride[i] - 1) / t->element_stride[i];
}

static inline uint32_t emu_tensor_map_bytes(const emu_tensor_map *t) { /* of the box, and of the transaction */
    uint32_t n = (uint32_t)t->element;
    for (int i = 0; i < t->rank; i++) n *= (uint32_t)emu_tensor_map_count(t, i);
    return n;
}

/* One box row: `global` is the address of its first element, wherever that lies; elements [first, last) are inside the
 * tensor; `offset` is its place in the unswizzled box. */
typedef struct {
    uint64_t global;
    uint32_t offset;
    int first, last;
} emu_box_row;

typedef struct {
    const emu_tensor_map *map;
    const int32_t *at;
    int index[5];
    int done;
    uint32_t offset;
} emu_box_walk;

static inline void emu_box_start(emu_box_walk *w, const emu_tensor_map *t, const int32_t *at) {
    memset(w, 0, sizeof *w);
    w->map = t;
    w->at = at;
}

/* The next row, 0 at the end. */
static inline int emu_box_next(emu_box_walk *w, emu_box_row *row) {
    const emu_tensor_map *t = w->map;
    if (w->done) return 0;
    int inside = 1, n = t->box[0];
    row->global = t->address + (uint64_t)((int64_t)w->at[0] * t->element);
    for (int i = 1; i < t->rank; i++) {
        int64_t c = (int64_t)w->at[i] + (int64_t)w->index[i] * t->element_stride[i];
        inside &= c >= 0 && c < t->dim[i];
        row->global += (uint64_t)c * t->stride[i];
    }
    int64_t low = -(int64_t)w->at[0], high = t->dim[0] - (int64_t)w->at[0];
    row->first = !inside || low > n ? n : low < 0 ? 0 : (int)low;
    row->last = !inside || high < row->first ? row->first : high > n ? n : (int)high;
    row->offset = w->offset;
    w->offset += (uint32_t)(n * t->element);
    int i = 1;
    for (; i < t->rank; i++) {
        if (++w->index[i] < emu_tensor_map_count(t, i)) break;
        w->index[i] = 0;
    }
    w->done = i >= t->rank;
    return 1;
}

/* What out-of-bounds elements become: zero, or for floating formats that ask for it a quiet NaN of all mantissa bits. */
static inline void emu_tensor_map_fill(const emu_tensor_map *t, uint8_t *to, int bytes) {
    memset(to, 0, (size_t)bytes);
    if (!t->fill_nan) return;
    for (int i = 0; i < bytes; i += t->element) {
        memset(to + i, 0xff, (size_t)t->element);
        to[i + t->element - 1] = 0x7f;
    }
}

#endif

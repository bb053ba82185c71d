/* The units that translated kernels call for matrix, tensor-memory and bulk-copy instructions.
 *
 * One call executes one warp instruction. Register operands are arrays of 32 lanes; vectors of registers are arrays of such
 * arrays. Predicates are lanes of 0 or not 0. Only lanes of `mask` act or are written. Shared addresses carry the CTA's rank. */
#ifndef EMU_TENSOR_UNITS_H
#define EMU_TENSOR_UNITS_H

#include <stdint.h>

#include "../machine.h"
#include "numbers.h"
#include "tmem.h"

typedef const uint32_t *emu_in32;
typedef const uint64_t *emu_in64;
typedef uint32_t *emu_out32;

/* ---- matrix.c */
void emu_ldmatrix(emu_warp *w, uint32_t mask, int count, int transposed, emu_out32 const *out, emu_in32 address);
void emu_stmatrix(emu_warp *w, uint32_t mask, int count, int transposed, emu_in32 const *in, emu_in32 address);
void emu_movmatrix(emu_warp *w, uint32_t mask, emu_out32 out, emu_in32 in);

/* d = a * b + c of one warp; c and d in EMU_F32, EMU_F16 or EMU_S32. */
void emu_mma_sync(emu_warp *w, uint32_t mask, int m, int n, int k, emu_format fa, emu_format fb, emu_format fd, emu_format fc,
                  int saturate, emu_out32 const *d, emu_in32 const *a, emu_in32 const *b, emu_in32 const *c);

/* A warp's 16 rows of a warpgroup's 64. Operand A from the descriptor `a_desc`, or from registers if that is NULL.
 * scale_d: predicate, or NULL for 1. negate_*: imm-scale is -1. mn_major_*: imm-trans. */
void emu_wgmma(emu_warp *w, uint32_t mask, int n, int k, emu_format fa, emu_format fb, emu_format fd, int saturate,
               emu_out32 const *d, emu_in64 a_desc, emu_in32 const *a_regs, emu_in64 b_desc, emu_in32 scale_d, int negate_a,
               int negate_b, int mn_major_a, int mn_major_b);
/* Registers that an asynchronous instruction works on belong to it until its wait (wgmma.wait_group, tcgen05.wait::ld): used or
 * written before, the value is undefined. Translated code asks at every other instruction that names one. */
#define EMU_FLIGHT_LD 0xffffffffu /* group of what tcgen05.ld loads */
typedef struct {
    uint32_t count;     /* of registers in flight */
    uint32_t committed; /* groups of wgmma */
    struct {
        const void *reg;
        uint32_t group;
    } item[1024];
} emu_flight;
static inline int emu_flight_any(const emu_warp *w) { return w->unit && ((const emu_flight *)w->unit)->count; }
void emu_flight_start(emu_warp *w, const void *reg, uint32_t group);
void emu_flight_touched(emu_warp *w, const void *reg, const char *name, int write);
/* A mov, packing and unpacking ones included, only moves names: what comes of a register in flight is in flight. NULL ends. */
void emu_flight_moved(emu_warp *w, const void *const *to, const void *const *from);
void emu_flight_loaded(emu_warp *w); /* tcgen05.wait::ld */
void emu_wgmma_commit(emu_warp *w, uint32_t mask);
void emu_wgmma_wait(emu_warp *w, uint32_t mask, int pending);

/* ---- tcgen05.c */
int emu_tcgen05_alloc(emu_warp *w, uint32_t mask, int groups, emu_in32 to, emu_in32 columns); /* 1: call again */
void emu_tcgen05_dealloc(emu_warp *w, uint32_t mask, int groups, emu_in32 address, emu_in32 columns);
void emu_tcgen05_relinquish(emu_warp *w, uint32_t mask, int groups);
/* A from `a_desc`, or from tensor memory at `a_address` if that is NULL. disabled: 4 * groups lane masks, or NULL.
 * scale: d is multiplied by 2^-scale. */
void emu_tcgen05_mma(emu_warp *w, uint32_t mask, int groups, emu_kind kind, emu_in32 d, emu_in64 a_desc, emu_in32 a_address,
                     emu_in64 b_desc, emu_in32 instruction, emu_in32 const *disabled, emu_in32 enable, int scale);
void emu_tcgen05_commit(emu_warp *w, uint32_t mask, int groups, emu_in32 mbarrier, emu_in32 multicast);
void emu_tcgen05_ld(emu_warp *w, uint32_t mask, emu_ld_shape shape, int num, int pack, emu_out32 const *out, emu_in32 address,
                    int split);
void emu_tcgen05_st(emu_warp *w, uint32_t mask, emu_ld_shape shape, int num, int unpack, emu_in32 const *in, emu_in32 address,
                    int split);
void emu_tcgen05_wait_ld(emu_warp *w, uint32_t mask);
void emu_tcgen05_wait_st(emu_warp *w, uint32_t mask);
typedef enum {
    EMU_CP_128X256B,
    EMU_CP_128X128B,
    EMU_CP_64X128B_02_13,
    EMU_CP_64X128B_01_23,
    EMU_CP_32X128B,
} emu_cp_shape;
void emu_tcgen05_cp(emu_warp *w, uint32_t mask, int groups, emu_cp_shape shape, emu_in32 address, emu_in64 descriptor);

/* ---- copy.c */
typedef enum {
    EMU_REDUCE_NONE,
    EMU_REDUCE_ADD,
    EMU_REDUCE_MIN,
    EMU_REDUCE_MAX,
    EMU_REDUCE_AND,
    EMU_REDUCE_OR,
    EMU_REDUCE_XOR,
} emu_reduction;
typedef enum { EMU_R_U32, EMU_R_S32, EMU_R_U64, EMU_R_S64, EMU_R_F16, EMU_R_BF16, EMU_R_F32, EMU_R_F64 } emu_reduced_type;
/* multicast: CTA mask, or NULL. */
void emu_tma_load(emu_warp *w, uint32_t mask, int rank, int groups, emu_in32 to, emu_in64 map, emu_in32 const *at,
                  emu_in32 mbarrier, emu_in32 multicast);
void emu_tma_store(emu_warp *w, uint32_t mask, int rank, emu_reduction reduction, emu_in64 map, emu_in32 const *at,
                   emu_in32 from);
void emu_tma_prefetch(emu_warp *w, uint32_t mask, int rank, emu_in64 map, emu_in32 const *at);
void emu_bulk_load(emu_warp *w, uint32_t mask, emu_in32 to, emu_in64 from, emu_in32 bytes, emu_in32 mbarrier,
                   emu_in32 multicast);
void emu_bulk_store(emu_warp *w, uint32_t mask, emu_in64 to, emu_in32 from, emu_in32 bytes, emu_reduction reduction,
                    emu_reduced_type type);
void emu_bulk_dsmem(emu_warp *w, uint32_t mask, emu_in32 to, emu_in32 from, emu_in32 bytes, emu_in32 mbarrier);
void emu_bulk_commit(emu_warp *w, uint32_t mask);
void emu_bulk_wait(emu_warp *w, uint32_t mask, int pending);

#endif

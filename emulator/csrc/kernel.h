/* What translated kernels call besides the tensor units: control flow, memory instructions, synchronisation. Every function acts
 * for the lanes in `mask`; registers are arrays of 32 lanes. */
#ifndef EMU_KERNEL_H
#define EMU_KERNEL_H

#include "machine.h"

/* Result of a kernel function. */
enum { EMU_YIELD, EMU_BLOCKED, EMU_DONE };

/* Orders and scopes of memory operations. */
enum { SEM_WEAK, SEM_VOLATILE, SEM_RELAXED, SEM_ACQUIRE, SEM_RELEASE, SEM_ACQ_REL };
enum { SCOPE_CTA, SCOPE_CLUSTER, SCOPE_GPU, SCOPE_SYS };
enum { SPACE_GLOBAL, SPACE_SHARED, SPACE_GENERIC };
enum { EXTEND_ZERO, EXTEND_S8, EXTEND_S16, EXTEND_S32 };

/* ---- control flow. A group is the lanes of a warp that stand at one block; groups merge where they meet. */
uint32_t emu_begin(emu_warp *w);                    /* block to run now, or ~0: nothing can */
int emu_result(emu_warp *w);                        /* ... and then the kernel function's result */
const uint32_t *emu_active_lanes(emu_warp *w);      /* the mask, a word a lane; valid until the next emu_* control call */
int emu_jump(emu_warp *w, uint32_t to, int back);   /* 1: go on there at once; 0: dispatch again */
int emu_branch(emu_warp *w, uint32_t taken, uint32_t to, uint32_t otherwise, uint32_t here); /* 0 taken, 1 not, 2 dispatch */
void emu_exit(emu_warp *w, uint32_t mask, uint32_t then);
int emu_slice(emu_warp *w, uint32_t here);          /* 1: the slice is spent, dispatch again */
int emu_converge(emu_warp *w, uint32_t members, uint32_t aligned); /* 1: members are missing, dispatch again */
void emu_instructions(emu_warp *w, uint32_t count);
void emu_unassigned(emu_warp *w, uint32_t mask, const char *name);
/* which = kind * 4 + dimension */
enum { SPECIAL_TID, SPECIAL_LANE, SPECIAL_LANEMASK, SPECIAL_LANEMASK_GE, SPECIAL_NTID, SPECIAL_CTAID, SPECIAL_NCTAID,
       SPECIAL_CLUSTERID, SPECIAL_NCLUSTERID, SPECIAL_CLUSTER_CTAID, SPECIAL_CLUSTER_NCTAID, SPECIAL_CLUSTER_CTARANK,
       SPECIAL_CLUSTER_NCTARANK, SPECIAL_IS_EXPLICIT, SPECIAL_WARP, SPECIAL_NWARP, SPECIAL_SM, SPECIAL_NSM, SPECIAL_DYNAMIC_SMEM,
       SPECIAL_TOTAL_SMEM, SPECIAL_CLOCK };
void emu_special(emu_warp *w, uint32_t which, uint32_t *out);
uint64_t emu_time(emu_warp *w);

/* ---- memory */
typedef struct emu_access {
    uint8_t space, bytes, count, extend, sem, scope;
    uint8_t wide; /* bit i: destination i is an array of 64-bit lanes */
} emu_access;
void emu_load(emu_warp *w, uint32_t mask, const emu_access *a, const uint64_t *address, int64_t offset, void *const *out);
void emu_store(emu_warp *w, uint32_t mask, const emu_access *a, const uint64_t *address, int64_t offset, const void *const *in);
void emu_load_param(emu_warp *w, uint32_t mask, uint32_t offset, uint32_t bytes, uint32_t count, uint32_t extend, uint32_t wide,
                    void *const *out);
enum { ATOM_ADD, ATOM_MIN_U, ATOM_MAX_U, ATOM_MIN_S, ATOM_MAX_S, ATOM_AND, ATOM_OR, ATOM_XOR, ATOM_EXCH, ATOM_CAS, ATOM_INC,
       ATOM_DEC, ATOM_ADD_F32, ATOM_ADD_F16X2, ATOM_ADD_BF16X2, ATOM_ADD_F64 };
void emu_atomic(emu_warp *w, uint32_t mask, const emu_access *a, uint32_t op, const uint64_t *address, int64_t offset,
                const void *b, const void *c, void *out);
void emu_cp_async(emu_warp *w, uint32_t mask, const uint32_t *to, int64_t to_offset, const uint64_t *from, int64_t from_offset,
                  uint32_t bytes, const uint32_t *source_bytes);
void emu_st_async(emu_warp *w, uint32_t mask, const uint32_t *to, int64_t offset, const uint32_t *mbar, int64_t mbar_offset,
                  uint32_t bytes, uint32_t count, uint32_t wide, const void *const *in);
void emu_prefetch(emu_warp *w, uint32_t mask, const uint64_t *address, int64_t offset);
/* clusterlaunchcontrol: no launch is ever cancelled, which the ISA allows. */
void emu_try_cancel(emu_warp *w, uint32_t mask, const uint32_t *to, int64_t offset, const uint32_t *mbar, int64_t mbar_offset,
                    uint32_t all);
uint32_t emu_map_rank(emu_warp *w, uint32_t address, uint32_t rank);

/* ---- synchronisation; the blocking ones return 1 if the warp has to wait: dispatch again, they will be executed anew */
int emu_bar_sync(emu_warp *w, uint32_t mask, uint32_t id, uint32_t threads);
void emu_bar_arrive(emu_warp *w, uint32_t mask, uint32_t id, uint32_t threads);
enum { RED_POPC, RED_AND, RED_OR };
int emu_bar_red(emu_warp *w, uint32_t mask, uint32_t id, uint32_t threads, uint32_t op, uint32_t lanes, uint32_t *out);
void emu_cluster_arrive(emu_warp *w, uint32_t mask, uint32_t relaxed);
int emu_cluster_wait(emu_warp *w, uint32_t mask);
enum { FENCE_ACQUIRE = 1, FENCE_RELEASE = 2 };
void emu_fence(emu_warp *w, uint32_t scope, uint32_t sides);
void emu_fence_proxy(emu_warp *w);
void emu_dependency_wait(emu_warp *w, uint32_t mask);
void emu_launch_dependents(emu_warp *w, uint32_t mask);
void emu_cp_async_mbar_arrive(emu_warp *w, uint32_t mask, const uint32_t *mbar, int64_t offset, uint32_t noinc);

void emu_mbar_init(emu_warp *w, uint32_t mask, const uint32_t *mbar, int64_t offset, const uint32_t *count);
void emu_mbar_inval(emu_warp *w, uint32_t mask, const uint32_t *mbar, int64_t offset);
/* expect: NULL, or bytes to expect before arriving; count: NULL for 1; state: NULL or where the phase token goes. */
void emu_mbar_arrive(emu_warp *w, uint32_t mask, const uint32_t *mbar, int64_t offset, const uint32_t *expect,
                     const uint32_t *count, uint64_t *state, uint32_t drop, uint32_t relaxed);
void emu_mbar_expect_tx(emu_warp *w, uint32_t mask, const uint32_t *mbar, int64_t offset, const uint32_t *bytes);
/* Waits by parity, or by a state token. block: try_wait, which may suspend the thread. */
int emu_mbar_wait(emu_warp *w, uint32_t mask, const uint32_t *mbar, int64_t offset, const uint32_t *parity,
                  const uint64_t *state, uint32_t block, uint32_t relaxed, uint32_t *done);

/* ---- the warp */
void emu_shuffle(emu_warp *w, uint32_t mask, uint32_t kind, uint32_t *out, uint32_t *valid, const uint32_t *in, const uint32_t *b,
                 const uint32_t *c);
void emu_elect(emu_warp *w, uint32_t mask, const uint32_t *members, uint32_t *leader, uint32_t *elected);
enum { VOTE_ALL, VOTE_ANY, VOTE_UNI, VOTE_BALLOT };
void emu_vote(emu_warp *w, uint32_t mask, uint32_t kind, uint32_t *out, const uint32_t *in, uint32_t negate);
enum { REDUX_ADD, REDUX_MIN_S, REDUX_MAX_S, REDUX_MIN_U, REDUX_MAX_U, REDUX_AND, REDUX_OR, REDUX_XOR, REDUX_MIN_F, REDUX_MAX_F,
       REDUX_MIN_F_NAN, REDUX_MAX_F_NAN };
void emu_redux(emu_warp *w, uint32_t mask, uint32_t kind, uint32_t *out, const uint32_t *in);
void emu_match_any(emu_warp *w, uint32_t mask, uint32_t *out, const uint32_t *in);

static inline uint32_t emu_bits(const uint32_t *lanes) {
    uint32_t bits = 0;
    for (int i = 0; i < EMU_LANES; i++) bits |= (lanes[i] & 1u) << i;
    return bits;
}

#endif

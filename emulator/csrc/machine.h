/* The machine: what translated kernels and the units (matrix, copy, descriptors) see of it.
 *
 * A warp runs in C until it ends, blocks or has spent its slice; the scheduler (schedule.c) picks the next one. Everything is
 * single-threaded, so a unit function runs to its end undisturbed. Asynchronous operations take effect at once, but as another
 * agent: what they touch is marked as the work of the issuing warp's asynchronous twin, and an access that no wait, barrier or
 * mbarrier orders after it is a race. So a missing wait is found by the shadow state, whatever the schedule.
 */
#ifndef EMU_MACHINE_H
#define EMU_MACHINE_H

#include <stdint.h>
#include <string.h>

#define EMU_LANES 32
#define EMU_SHARED_BASE 0x400u           /* the symbol's offset in a CTA's window; below it lies the system's part */
#define EMU_SHARED_RANK_SHIFT 24         /* shared address = (rank in cluster << 24) + offset */
#define EMU_GENERIC_SHARED (1ull << 56)  /* generic address of shared memory: this bit, then the 32-bit shared address */
#define EMU_TMEM_LANES 128
#define EMU_TMEM_COLUMNS 512

typedef struct emu_machine emu_machine;
typedef struct emu_grid emu_grid;
typedef struct emu_cluster emu_cluster;
typedef struct emu_cta emu_cta;
typedef struct emu_warp emu_warp;

/* How a byte range is touched. */
enum {
    EMU_READ = 1,
    EMU_WRITE = 2,
    EMU_ATOMIC = 4,   /* morally strong: volatile, relaxed or stronger; two such accesses do not race */
    EMU_ASYNC = 8,    /* by the asynchronous proxy, as the warp's asynchronous twin (bulk copies, TMA, wgmma, tcgen05) */
    EMU_BY_TWIN = 16, /* by the asynchronous twin, but through the generic proxy (cp.async, st.async) */
    EMU_NOINIT = 32,  /* do not ask whether what is read was ever written */
    EMU_AGAIN = 64,   /* global: for another destination of a multicast; it moved once */
};

/* What a finding is about; names in findings.py stand in this order. */
typedef enum {
    EMU_F_BOUNDS,
    EMU_F_ALIGN,
    EMU_F_UNINIT,
    EMU_F_RACE,
    EMU_F_PROXY,
    EMU_F_MBARRIER,
    EMU_F_BARRIER,    /* bar, cluster barriers, convergence of .sync */
    EMU_F_TMEM,
    EMU_F_DEADLOCK,
    EMU_F_PDL,
    EMU_F_LIMIT,      /* shared-memory or thread limits of the target */
    EMU_F_DESCRIPTOR, /* malformed tensor maps, shared-memory or instruction descriptors */
    EMU_F_OPERAND,    /* an operand outside what the ISA allows */
    EMU_F_ASYNC,      /* result of an asynchronous operation used without its wait */
    EMU_F_COUNT
} emu_category;

/* Counters of one launch; counters.py names them in this order. */
typedef enum {
    EMU_C_INSTRUCTIONS, /* warp instructions */
    EMU_C_LOAD_BYTES,   /* global, by lanes */
    EMU_C_STORE_BYTES,
    EMU_C_LOAD_SECTORS, /* 32-byte sectors that each warp instruction touches, summed */
    EMU_C_STORE_SECTORS,
    EMU_C_SHARED_WAVES, /* shared-memory wavefronts; conflicts = waves - accesses */
    EMU_C_SHARED_ACCESSES,
    EMU_C_BARRIER_WAITS,
    EMU_C_TMA_LOAD_BYTES,
    EMU_C_TMA_STORE_BYTES,
    EMU_C_MATRIX_FLOPS,
    EMU_C_UNIQUE_LOAD_SECTORS, /* different 32-byte sectors of global memory, by whatever touched them */
    EMU_C_UNIQUE_STORE_SECTORS,
    EMU_C_COUNT
} emu_counter;

/* The asynchronous twins of a warp; see emu_async_begin. */
enum { EMU_TWIN_CP_ASYNC, EMU_TWIN_BULK, EMU_TWIN_WGMMA, EMU_TWIN_TCGEN05, EMU_TWIN_MBAR0, EMU_TWINS = 8 };
typedef enum { EMU_Q_CP_ASYNC, EMU_Q_BULK, EMU_Q_WGMMA, EMU_Q_COUNT } emu_queue;

#define EMU_GROUPS 64 /* committed groups of one queue that a warp may have in flight */

struct emu_cta {
    emu_cluster *cluster;
    emu_grid *grid;
    uint32_t id[3];     /* ctaid */
    uint32_t rank;      /* in its cluster */
    uint8_t *shared;    /* window from offset 0; shared_end bytes, EMU_SHARED_BASE of them the system's */
    uint32_t shared_end;
    void *tmem;         /* the tensor-core unit's, created on first use by emu_tmem_new, freed with emu_tmem_free */
    struct emu_cell *cells; /* shadow of shared memory */
    uint8_t *written;       /* a byte each: ever written */
    struct emu_bar *bars;   /* 16 hardware barriers */
    struct emu_mbar *mbars;
    emu_warp **warps;
    uint32_t warp_count, live_warps;
    uint32_t launched_dependents, released_early, sm; /* early: by a warp that was not behind a wait */
    uint32_t pair_allocs; /* tcgen05.alloc.cta_group::2 executed */
};

struct emu_cluster {
    emu_grid *grid;
    emu_cta **ctas; /* by rank */
    uint32_t size, dims[3];
    uint32_t id[3]; /* clusterid */
    uint32_t first_agent; /* agents are the cluster's warps and, after those, EMU_TWINS twins of each */
    uint32_t agents, warps;
    struct emu_sync *barrier; /* cluster barrier */
    uint32_t bar_arrived, bar_phase, live_warps;
};

struct emu_warp {
    emu_cta *cta;
    emu_machine *machine;
    uint32_t index;        /* in its CTA */
    int32_t lane;          /* whom findings and shadow marks name: a lane, or -1 for the warp; set it before emu_shared/emu_global */
    uint32_t line;         /* PTX line being executed */
    uint32_t active;       /* mask of the group being executed */
    uint32_t threads;      /* mask of lanes that exist */
    uint32_t exited;       /* mask of lanes that ended */
    uint32_t started;
    const uint8_t *params; /* kernel parameter bytes */
    uint8_t *registers;    /* the translated kernel's register file: arrays of 32 lanes */
    /* Asynchronous operations: the twin that acts, the clock of each, and of each committed group. */
    uint32_t twin, twin_clock[EMU_TWINS];
    struct { uint32_t last, open, count, clock[EMU_GROUPS]; } queue[EMU_Q_COUNT];
    void *unit;            /* for the matrix units: state of this warp; freed with free() */
    struct emu_run *run;   /* the scheduler's */
};

/* ---- findings */
/* Records a finding at w's PTX line and lane. Execution goes on unless the launch is to stop at the first. */
void emu_finding(emu_warp *w, emu_category category, const char *format, ...) __attribute__((format(printf, 3, 4)));
/* An internal impossibility or an unsupported case met at run time: the launch ends with this error. Returns. */
void emu_fatal(emu_warp *w, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* ---- memory. NULL after a finding: skip the access (reads count as zero). `bytes` may span many words (a whole box row, a
 * matrix row); alignment is the caller's to check with emu_aligned. Record the counters yourself. */
uint8_t *emu_shared(emu_warp *w, uint32_t address, uint32_t bytes, uint32_t access);
uint8_t *emu_global(emu_warp *w, uint64_t address, uint64_t bytes, uint32_t access);
/* Whether all of a shared range was written (EMU_NOINIT: or not), and by nothing that is unordered with w's next access (0) or the asynchronous
 * operation just begun (EMU_ASYNC): reports and records nothing. 1 for what emu_shared would refuse. */
int emu_settled(emu_warp *w, uint32_t address, uint32_t bytes, uint32_t access);
/* A kernel parameter or global address holding e.g. a tensor map: generic lookup in params, shared and global. */
const uint8_t *emu_generic_read(emu_warp *w, uint64_t address, uint32_t bytes);
/* 1 if aligned; else reports EMU_F_ALIGN and returns 0. */
int emu_aligned(emu_warp *w, uint64_t address, uint32_t alignment, const char *what);

emu_cta *emu_cluster_cta(emu_warp *w, uint32_t rank);  /* NULL after a finding if there is none */

/* ---- asynchronous operations. Call emu_async_begin once per operation, before its accesses with EMU_ASYNC / EMU_BY_TWIN: they
 * are then checked against what w knows now, and marked with a new clock of the twin. A warp has several twins, one for each way
 * to learn of completion, so that a wait on one mbarrier says nothing of operations that complete on another. */
#define EMU_TWIN_MBAR(shared_address) (EMU_TWIN_MBAR0 + (((shared_address) >> 3) & 3u))
void emu_async_begin(emu_warp *w, uint32_t twin);

/* A point in time of w (access 0) or of the operation just begun (EMU_ASYNC), to be kept beside data without shadow (TMEM). */
typedef struct { uint32_t agent, clock; } emu_stamp; /* agent counts in the cluster; clock 0: never */
emu_stamp emu_now(emu_warp *w, uint32_t access);
/* 1 if what carries the stamp is ordered before w's next access: by w itself, or, with EMU_ASYNC, by the operation just begun. */
int emu_ordered(emu_warp *w, emu_stamp stamp, uint32_t access);
/* The operation just begun belongs to the open group of a queue; commit closes it; wait(n) orders w after all but the n latest
 * groups. */
void emu_async_join(emu_warp *w, emu_queue queue);
void emu_async_commit(emu_warp *w, emu_queue queue);
void emu_async_wait(emu_warp *w, emu_queue queue, uint32_t pending);

/* ---- mbarriers, by shared address (with rank). The operation just begun completes there: who waits on the phase is ordered
 * after it. complete_tx may come before expect_tx. */
void emu_mbar_complete_tx(emu_warp *w, uint32_t address, uint32_t bytes);
/* Arrival by the asynchronous agent (tcgen05.commit): also covers every operation that w began earlier. */
void emu_mbar_arrive_async(emu_warp *w, uint32_t address, uint32_t count);

/* The group waits for something of a unit's, and asks again when others have run. Returns 1, for the caller to return. */
enum { EMU_FOR_TMEM, EMU_FOR_PEER_ALLOC };
int emu_unit_waits(emu_warp *w, uint32_t what);

/* ---- counters */
void emu_count(emu_warp *w, emu_counter counter, uint64_t amount);

/* ---- provided by the tensor units (csrc/tensor) */
void *emu_tmem_new(emu_cta *cta);
/* At a CTA's end; reports what is still allocated at warp w. */
void emu_tmem_free(emu_warp *w, void *tmem);

#endif

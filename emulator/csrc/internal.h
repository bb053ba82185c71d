/* What the machine's own files share. */
#ifndef EMU_INTERNAL_H
#define EMU_INTERNAL_H

#include "machine.h"
#include <stddef.h>
#include <stdlib.h>

/* ---- happens-before. Agents are the warps of a cluster and, after those, their asynchronous twins. A clock vector is kept
 * per agent of the own cluster, twice: what is ordered before, and what is ordered before and visible to the asynchronous proxy.
 * Agents of other clusters and grids stand in a third vector, which exists once something was acquired from one. */
typedef struct {
    uint32_t *local, *proxy; /* [cluster agents] */
    uint32_t *far;           /* [agents of the batch], by global number, or NULL */
} emu_clock;

/* One cell of shadow for 4 bytes: the last write and the last read. A tag is
 * agent:20 | lane:5 | bytes:4 | atomic:1 | async:1 | valid:1; shared memory names agents of the cluster, global memory of the batch. */
typedef struct emu_cell {
    uint32_t write_tag, write_clock, read_tag, read_clock;
} emu_cell;
#define TAG_AGENT(t) ((t) >> 12)
#define TAG_LANE(t) (((t) >> 7) & 31u)
#define TAG_BYTES(t) (((t) >> 3) & 15u)
#define TAG_ATOMIC 4u
#define TAG_ASYNC 2u
#define TAG_VALID 1u
#define MAX_AGENTS (1u << 20)

/* The agents of a cluster: where their global numbers begin, and how many. */
typedef struct {
    uint32_t first, count;
} emu_span;
static inline emu_span emu_span_of(const emu_cluster *c) { return (emu_span){c->first_agent, c->agents}; }

/* A variable that orders: an mbarrier, a hardware barrier, a word of memory accessed by strong operations. */
typedef struct emu_sync {
    uint64_t key;
    emu_clock clock;
    emu_span of;            /* whose numbering `local` has; the cluster itself may be gone */
    uint32_t cta_scope;     /* last released at CTA scope ... */
    emu_cta *cta;           /* ... by this CTA */
    struct emu_sync *next;
} emu_sync;

typedef struct emu_mbar {
    uint32_t offset, count, pending, phase;
    int64_t tx;
    uint32_t initialised;
    emu_stamp init;
    emu_sync arriving, done;
    struct emu_mbar *next;
} emu_mbar;

typedef struct emu_bar {
    uint32_t arrived, expected, phase;
    uint32_t red[3], red_done[3]; /* popc, and, or */
    emu_sync arriving, done;
} emu_bar;

enum { WAIT_NONE, WAIT_BAR, WAIT_MBAR, WAIT_CLUSTER, WAIT_CONVERGE, WAIT_UNIT };

typedef struct {
    uint32_t pc, mask;
    uint32_t wait, a, b; /* what the group waits for: barrier id and phase, mbarrier address and parity, ... */
    uint32_t timed_out;  /* a try_wait that may answer false now */
    uint32_t entered;    /* the blocking instruction has made its arrival */
    uint32_t spins;      /* back edges since another group ran */
    uint32_t line;       /* of the instruction that waits */
    uint64_t last;
} emu_group;

typedef struct emu_run {
    emu_group group[EMU_LANES];
    uint32_t count, current;
    int32_t budget;
    uint32_t finished, waited_dependency, wait_clock;
    uint64_t instructions, last_run;
    uint32_t agent, twin;  /* in the cluster */
    uint32_t clock;
    emu_clock now, release, acquire; /* at present; at the last fence; gathered by relaxed loads for the next one */
    uint32_t has_release, has_acquire;
    uint32_t lanes[EMU_LANES]; /* the active mask, a word a lane */
    uint32_t result, slot; /* of the kernel function; in the machine's list */
    uint64_t starved;
    uint32_t cluster_phase, cluster_arrived;
    uint64_t rng;
    uint32_t delayed, delays; /* stores under way (delay.c); whether the instruction at hand delays any */
} emu_run;

typedef struct emu_delayed emu_delayed;

typedef struct {
    uint64_t lo, hi;
    uint32_t flags, name, age; /* age: batches since, of past */
    emu_cell *cells;      /* of this batch, made when first touched */
    uint8_t *copy;        /* past: the bytes as the launch left them; what the host changed since is no dependency */
    uint8_t *written;     /* REGION_TRACK: one a byte, kept by the caller over launches */
} emu_region;
enum { REGION_FOREIGN = 1 /* other processes write it too */, REGION_READ_ONLY = 2 };

typedef struct {
    uint32_t category, line, lane, warp, cta[3], grid, count;
    char text[400];
} emu_finding_record;

/* What one grid moved from (0) and to (1) one region. seen: a bit a sector; sectors counts those set. */
typedef struct {
    uint64_t bytes[2], sectors[2];
    uint8_t *seen[2];
} emu_traffic;

typedef int (*emu_kernel)(emu_warp *w);

/* sync.c: a warp has ended; what waits for all may go on */
void emu_bar_check_exit(emu_warp *w);
void emu_cluster_check(emu_warp *w);

struct emu_grid {
    emu_machine *machine;
    emu_kernel kernel;
    uint32_t dims[3], block[3], cluster_dims[3];
    uint32_t shared_bytes, dynamic_bytes, register_bytes, threads, warps;
    uint32_t cooperative, dependent; /* launch attributes */
    uint32_t index, launched_dependents, stream; /* grids of one stream run one after another */
    char name[128];
    const uint8_t *params;
    uint32_t param_bytes;
    uint32_t agent_base, agents;
    uint64_t clusters, next_cluster, done_clusters;
    uint32_t resident_limit;
    emu_cluster **resident;
    uint32_t resident_count;
    uint32_t waited;                 /* some warp executed griddepcontrol.wait */
    uint32_t released_late;          /* some CTA let dependents begin behind a wait only: by launch_dependents, or by its end */
    uint32_t open;                   /* at the end of the batch: a later launch may begin beside it */
    uint64_t counters[EMU_C_COUNT];
    emu_traffic *traffic;            /* by region of the batch; made when first touched */
};

/* Whether all that came before a grid is complete when what comes behind it begins. */
static inline int emu_holds_back(const emu_grid *g) { return !g->dependent || (g->waited && g->released_late); }

#define SYNC_BUCKETS 4096
struct emu_machine {
    emu_grid *grids;
    uint32_t grid_count;
    emu_region *regions;
    uint32_t region_count, last_region;
    emu_region *past;      /* what the launches before touched that a dependent launch has yet to wait for, oldest first */
    uint32_t past_count;
    char (*names)[96];
    uint32_t checks;       /* bit 1 << category; 0: only what cannot be run through */
    uint32_t policy;       /* 0 round robin, 1 random, 2 adversarial */
    uint64_t rng;
    uint32_t batch_agents;
    emu_sync *syncs[SYNC_BUCKETS];
    emu_finding_record *findings;
    uint32_t finding_count, finding_room;
    uint32_t stop, stop_at_first;
    char fatal[600];
    emu_warp **warps;      /* resident and not ended */
    uint32_t warp_count, warp_room, foreign;
    uint64_t progress;     /* anything that another warp may wait for */
    uint64_t ticks;        /* slices run */
    uint64_t time_ns;
    uint32_t shared_limit;
    uint32_t resident_clusters, sms;
    uint64_t slice_limit;  /* 0: none */
    int (*interrupted)(void);
    uint64_t time_read;    /* a kernel asked for the time since the last progress */
    emu_delayed *delayed;  /* stores under way, in no order; due: when the first arrives */
    uint32_t delayed_count, delayed_wide; /* wide: ordered before more than their warp */
    uint64_t due;
};

#define CHECK(m, category) (((m)->checks >> (category)) & 1u)

/* clocks.c */
void emu_clock_new(emu_clock *c, uint32_t agents);
void emu_clock_free(emu_clock *c);
void emu_join(emu_machine *m, emu_span to_of, emu_clock *to, emu_span from_of, const emu_clock *from);
void emu_tick(emu_warp *w);
void emu_release_to(emu_warp *w, emu_sync *s, const emu_clock *what, uint32_t cta_scope);
void emu_acquire_from(emu_warp *w, emu_sync *s, emu_clock *into, uint32_t cta_scope);
emu_sync *emu_sync_at(emu_machine *m, uint64_t key, int create);
void emu_sync_free(emu_sync *s);

/* memory.c */
const char *emu_region_name(emu_machine *m, uint32_t name);
void emu_region_free(emu_region *r);
int emu_after_wait(emu_warp *w);
emu_region *emu_find_region(emu_machine *m, uint64_t lo, uint64_t bytes);
int emu_shadow_global(emu_warp *w, emu_region *r, uint64_t address, uint64_t bytes, uint32_t access);
int emu_shadow_shared(emu_warp *w, emu_cta *cta, uint32_t offset, uint32_t bytes, uint32_t access);

/* sync.c */
emu_mbar *emu_mbar_find(emu_cta *cta, uint32_t offset);
void emu_mbar_free(emu_cta *cta);
int emu_poll(emu_warp *w, emu_group *g);

/* delay.c */
struct emu_access;
int emu_delay(emu_warp *w, const struct emu_access *a, uint64_t key, uint8_t *to, const uint8_t *data, int first); /* 1: it is */
void emu_delay_touch(emu_warp *w, const uint8_t *at, uint64_t bytes); /* what is ordered before w and overlaps arrives */
void emu_delay_release(emu_warp *w, uint32_t cta_scope);
void emu_delay_due(emu_machine *m, uint64_t now);
void emu_delay_warp_ends(emu_warp *w);
void emu_delay_cluster_ends(emu_cluster *c, int grid_too);

/* schedule.c */
int emu_block(emu_warp *w, uint32_t kind, uint32_t a, uint32_t b);
const char *emu_wait_text(emu_warp *w, emu_group *g, char *out, size_t room);
#endif

/* Barriers: mbarriers, the CTA's hardware barriers, the cluster's, and dependent launches. */
#include "internal.h"
#include "kernel.h"

static void pass(emu_machine *m, emu_cluster *of, emu_sync *from, emu_sync *to) {
    if (!from->clock.local) return;
    emu_span span = emu_span_of(of);
    if (!to->clock.local) {
        emu_clock_new(&to->clock, span.count);
        to->of = span;
    }
    emu_join(m, span, &to->clock, span, &from->clock);
}

/* ---- mbarriers */
emu_mbar *emu_mbar_find(emu_cta *cta, uint32_t offset) {
    emu_mbar *b = cta->mbars;
    while (b && b->offset != offset) b = b->next;
    return b;
}

void emu_mbar_free(emu_cta *cta) {
    for (emu_mbar *b = cta->mbars, *next; b; b = next) {
        next = b->next;
        emu_sync_free(&b->arriving);
        emu_sync_free(&b->done);
        free(b);
    }
    cta->mbars = NULL;
}

static emu_mbar *mbar_at(emu_warp *w, uint32_t address, const char *what) {
    emu_cta *cta = emu_cluster_cta(w, address >> EMU_SHARED_RANK_SHIFT);
    if (!cta || !emu_aligned(w, address, 8, what)) return NULL;
    uint32_t offset = address & ((1u << EMU_SHARED_RANK_SHIFT) - 1);
    emu_mbar *b = emu_mbar_find(cta, offset);
    if (!b || !b->initialised) {
        emu_finding(w, EMU_F_MBARRIER, "%s on shared +%d%s, which is no initialised mbarrier", what,
                    (int)(offset - EMU_SHARED_BASE), cta == w->cta ? "" : " of another CTA");
        return NULL;
    }
    if (cta != w->cta && !cta->live_warps) {
        emu_finding(w, EMU_F_MBARRIER, "%s on an mbarrier of CTA rank %u, which has ended", what, cta->rank);
        return NULL;
    }
    if (!emu_ordered(w, b->init, 0))
        emu_finding(w, EMU_F_RACE, "%s on the mbarrier at shared +%d%s by a thread that its initialisation is not ordered before", what,
                    (int)(offset - EMU_SHARED_BASE), cta == w->cta ? "" : " of another CTA");
    return b;
}

static void complete_if_due(emu_warp *w, emu_mbar *b) {
    if (b->pending || b->tx) return;
    pass(w->machine, w->cta->cluster, &b->arriving, &b->done);
    b->phase++;
    b->pending = b->count;
    w->machine->progress++;
}

static void arrive(emu_warp *w, emu_mbar *b, uint32_t count) {
    if (count > b->pending) {
        emu_finding(w, EMU_F_MBARRIER, "%u arrivals on the mbarrier at shared +%d, whose phase %u waits for %u", count,
                    (int)(b->offset - EMU_SHARED_BASE), b->phase, b->pending);
        count = b->pending;
    }
    b->pending -= count;
    complete_if_due(w, b);
}

/* An asynchronous operation of w completes: what it did, and what w knew to be done when it began, is ordered before whoever waits;
 * what w did since its last release is not. */
static void complete(emu_warp *w, emu_sync *s, uint32_t twin) {
    emu_run *r = w->run;
    emu_cluster *of = w->cta->cluster;
    if (!s->clock.local) {
        emu_clock_new(&s->clock, of->agents);
        s->of = emu_span_of(of);
    }
    uint32_t own = s->clock.local[r->agent], agent = of->warps + r->agent * EMU_TWINS + twin;
    emu_join(w->machine, s->of, &s->clock, emu_span_of(of), &r->now);
    s->clock.local[r->agent] = own > r->clock - 1 ? own : r->clock - 1;
    if (s->clock.local[agent] < w->twin_clock[twin]) s->clock.local[agent] = w->twin_clock[twin];
}

void emu_mbar_complete_tx(emu_warp *w, uint32_t address, uint32_t bytes) {
    emu_mbar *b = mbar_at(w, address, "complete_tx");
    if (!b) return;
    complete(w, &b->arriving, w->twin);
    b->tx -= bytes;
    if (b->tx < -(1 << 20) + 1) emu_finding(w, EMU_F_MBARRIER, "the transaction count of the mbarrier at shared +%d leaves its range",
                                            (int)(b->offset - EMU_SHARED_BASE));
    complete_if_due(w, b);
}

void emu_mbar_arrive_async(emu_warp *w, uint32_t address, uint32_t count) {
    emu_mbar *b = mbar_at(w, address, "arrive");
    if (!b) return;
    emu_async_begin(w, EMU_TWIN_TCGEN05);
    complete(w, &b->arriving, EMU_TWIN_TCGEN05);
    arrive(w, b, count);
}

void emu_mbar_init(emu_warp *w, uint32_t mask, const uint32_t *mbar, int64_t offset, const uint32_t *count) {
    for (uint32_t i = 0; i < EMU_LANES; i++) {
        if (!(mask >> i & 1)) continue;
        w->lane = (int)i;
        uint32_t address = mbar[i] + (uint32_t)offset;
        if (!emu_aligned(w, address, 8, "mbarrier.init")) continue;
        uint8_t *at = emu_shared(w, address, 8, EMU_WRITE);
        if (!at) continue;
        if (count[i] == 0 || count[i] >= 1u << 20) {
            emu_finding(w, EMU_F_MBARRIER, "mbarrier.init with count %u, allowed 1 to %u", count[i], (1u << 20) - 1);
            continue;
        }
        emu_cta *cta = emu_cluster_cta(w, address >> EMU_SHARED_RANK_SHIFT);
        uint32_t where = address & ((1u << EMU_SHARED_RANK_SHIFT) - 1);
        emu_mbar *b = emu_mbar_find(cta, where);
        if (b && b->initialised && (b->phase || b->pending != b->count || b->tx))
            emu_finding(w, EMU_F_MBARRIER, "mbarrier.init of an mbarrier in use at shared +%d", (int)(where - EMU_SHARED_BASE));
        if (!b) {
            b = calloc(1, sizeof *b);
            b->offset = where;
            b->next = cta->mbars;
            cta->mbars = b;
        }
        b->count = b->pending = count[i];
        b->phase = 0;
        b->tx = 0;
        b->initialised = 1;
        b->init = emu_now(w, 0);
        uint64_t word = 0x6d62617200000000ull | count[i];
        memcpy(at, &word, 8);
        w->machine->progress++;
    }
    w->lane = -1;
}

void emu_mbar_inval(emu_warp *w, uint32_t mask, const uint32_t *mbar, int64_t offset) {
    for (uint32_t i = 0; i < EMU_LANES; i++) {
        if (!(mask >> i & 1)) continue;
        w->lane = (int)i;
        emu_mbar *b = mbar_at(w, mbar[i] + (uint32_t)offset, "mbarrier.inval");
        if (b) b->initialised = 0;
    }
    w->lane = -1;
}

void emu_mbar_expect_tx(emu_warp *w, uint32_t mask, const uint32_t *mbar, int64_t offset, const uint32_t *bytes) {
    for (uint32_t i = 0; i < EMU_LANES; i++) {
        if (!(mask >> i & 1)) continue;
        w->lane = (int)i;
        emu_mbar *b = mbar_at(w, mbar[i] + (uint32_t)offset, "expect_tx");
        if (b) b->tx += bytes[i];
    }
    w->lane = -1;
}

void emu_mbar_arrive(emu_warp *w, uint32_t mask, const uint32_t *mbar, int64_t offset, const uint32_t *expect,
                     const uint32_t *count, uint64_t *state, uint32_t drop, uint32_t relaxed) {
    for (uint32_t i = 0; i < EMU_LANES; i++) {
        if (!(mask >> i & 1)) continue;
        w->lane = (int)i;
        emu_mbar *b = mbar_at(w, mbar[i] + (uint32_t)offset, "arrive");
        if (!b) continue;
        if (state) state[i] = b->phase;
        if (expect) {
            b->tx += expect[i];
            if (b->tx >= 1 << 20) emu_finding(w, EMU_F_MBARRIER, "expect_tx takes the transaction count to %lld, allowed %u",
                                              (long long)b->tx, (1u << 20) - 1);
        }
        if (!relaxed) {
            emu_delay_release(w, 0);
            emu_release_to(w, &b->arriving, &w->run->now, 0);
        }
        if (drop) b->count -= count ? count[i] : 1;
        arrive(w, b, count ? count[i] : 1);
    }
    w->lane = -1;
}

int emu_mbar_wait(emu_warp *w, uint32_t mask, const uint32_t *mbar, int64_t offset, const uint32_t *parity,
                  const uint64_t *state, uint32_t block, uint32_t relaxed, uint32_t *done) {
    emu_run *r = w->run;
    emu_group *g = &r->group[r->current];
    uint32_t waiting = 0, first = 0, result = 0;
    for (uint32_t i = 0; i < EMU_LANES; i++) {
        if (!(mask >> i & 1)) continue;
        w->lane = (int)i;
        uint32_t address = mbar[i] + (uint32_t)offset;
        if (address >> EMU_SHARED_RANK_SHIFT != w->cta->rank)
            emu_finding(w, EMU_F_MBARRIER, "a wait on an mbarrier of another CTA (rank %u)", address >> EMU_SHARED_RANK_SHIFT);
        emu_mbar *b = mbar_at(w, address, "wait");
        int passed = !b || (state ? (uint32_t)state[i] != b->phase : (b->phase & 1) != (parity[i] & 1));
        if (passed) {
            result |= 1u << i;
            if (b && !relaxed) emu_acquire_from(w, &b->done, &r->now, 0);
        } else if (!waiting++) {
            first = i;
        }
    }
    w->lane = -1;
    if (waiting && block && !g->timed_out) {
        w->cta->grid->counters[EMU_C_BARRIER_WAITS]++;
        return emu_block(w, WAIT_MBAR, mbar[first] + (uint32_t)offset, state ? (uint32_t)state[first] & 1 : parity[first] & 1);
    }
    g->timed_out = 0;
    g->entered = 0;
    for (uint32_t i = 0; i < EMU_LANES; i++)
        if (mask >> i & 1) done[i] = result >> i & 1 ? ~0u : 0;
    if (!waiting) w->machine->progress++;
    return 0;
}

void emu_cp_async_mbar_arrive(emu_warp *w, uint32_t mask, const uint32_t *mbar, int64_t offset, uint32_t noinc) {
    for (uint32_t i = 0; i < EMU_LANES; i++) {
        if (!(mask >> i & 1)) continue;
        w->lane = (int)i;
        emu_mbar *b = mbar_at(w, mbar[i] + (uint32_t)offset, "cp.async.mbarrier.arrive");
        if (!b) continue;
        if (!noinc) b->pending++;
        complete(w, &b->arriving, EMU_TWIN_CP_ASYNC);
        arrive(w, b, 1);
    }
    w->lane = -1;
}

/* ---- the CTA's hardware barriers. Warps arrive; a warp's exit counts as an arrival at whatever waits for all. */
static uint32_t due(emu_cta *cta, emu_bar *b) {
    uint32_t warps = b->expected ? b->expected / 32 : cta->live_warps;
    return b->arrived && b->arrived >= warps;
}

static void flip(emu_warp *w, emu_bar *b) {
    pass(w->machine, w->cta->cluster, &b->arriving, &b->done);
    b->arrived = 0;
    b->phase++;
    memcpy(b->red_done, b->red, sizeof b->red);
    b->red[RED_POPC] = b->red[RED_OR] = 0;
    b->red[RED_AND] = ~0u;
    w->machine->progress++;
}

void emu_bar_check_exit(emu_warp *w) {
    for (uint32_t i = 0; i < 16; i++)
        if (w->cta->live_warps && !w->cta->bars[i].expected && due(w->cta, &w->cta->bars[i])) flip(w, &w->cta->bars[i]);
}

static emu_bar *bar_arrival(emu_warp *w, uint32_t mask, uint32_t id, uint32_t threads, const char *what) {
    if (id >= 16) {
        emu_finding(w, EMU_F_OPERAND, "%s %u, allowed 0 to 15", what, id);
        return NULL;
    }
    if (threads % 32) emu_finding(w, EMU_F_OPERAND, "%s of %u threads, which is no multiple of 32", what, threads);
    if (mask != (w->threads & ~w->exited))
        emu_finding(w, EMU_F_BARRIER, "%s by lanes 0x%08x of a warp whose live lanes are 0x%08x", what, mask, w->threads & ~w->exited);
    emu_bar *b = &w->cta->bars[id];
    if (b->arrived && b->expected != threads)
        emu_finding(w, EMU_F_BARRIER, "%s %u for %u threads, while others wait there for %u", what, id, threads, b->expected);
    b->expected = threads;
    emu_delay_release(w, 1);
    emu_release_to(w, &b->arriving, &w->run->now, 0);
    b->arrived++;
    w->machine->progress++;
    return b;
}

int emu_bar_sync(emu_warp *w, uint32_t mask, uint32_t id, uint32_t threads) {
    emu_group *g = &w->run->group[w->run->current];
    emu_bar *b;
    if (!g->entered) {
        b = bar_arrival(w, mask, id, threads, "bar.sync");
        if (!b) return 0;
        g->entered = 1;
        g->b = b->phase;
        if (due(w->cta, b)) flip(w, b);
    }
    b = &w->cta->bars[id];
    if (b->phase == g->b) {
        w->cta->grid->counters[EMU_C_BARRIER_WAITS]++;
        return emu_block(w, WAIT_BAR, id, g->b);
    }
    g->entered = 0;
    emu_acquire_from(w, &b->done, &w->run->now, 0);
    return 0;
}

void emu_bar_arrive(emu_warp *w, uint32_t mask, uint32_t id, uint32_t threads) {
    emu_bar *b = bar_arrival(w, mask, id, threads, "bar.arrive");
    if (b && due(w->cta, b)) flip(w, b);
}

int emu_bar_red(emu_warp *w, uint32_t mask, uint32_t id, uint32_t threads, uint32_t op, uint32_t lanes, uint32_t *out) {
    emu_group *g = &w->run->group[w->run->current];
    emu_bar *b = &w->cta->bars[id & 15];
    if (!g->entered) {
        if (!b->arrived) b->red[RED_POPC] = b->red[RED_OR] = 0, b->red[RED_AND] = ~0u;
        b->red[RED_POPC] += (uint32_t)__builtin_popcount(lanes & mask);
        if ((lanes & mask) != mask) b->red[RED_AND] = 0;
        if (lanes & mask) b->red[RED_OR] = ~0u;
    }
    if (emu_bar_sync(w, mask, id, threads)) return 1;
    for (uint32_t i = 0; i < EMU_LANES; i++)
        if (mask >> i & 1) out[i] = b->red_done[op];
    return 0;
}

/* ---- the cluster's barrier */
void emu_cluster_check(emu_warp *w) {
    emu_cluster *c = w->cta->cluster;
    if (!c->bar_arrived || c->bar_arrived < c->live_warps) return;
    pass(w->machine, c, &c->barrier[0], &c->barrier[1]);
    c->bar_arrived = 0;
    c->bar_phase++;
    w->machine->progress++;
}

void emu_cluster_arrive(emu_warp *w, uint32_t mask, uint32_t relaxed) {
    emu_run *r = w->run;
    emu_cluster *c = w->cta->cluster;
    if (mask != (w->threads & ~w->exited))
        emu_finding(w, EMU_F_BARRIER, "barrier.cluster.arrive by lanes 0x%08x of a warp whose live lanes are 0x%08x", mask,
                    w->threads & ~w->exited);
    if (r->cluster_arrived) emu_finding(w, EMU_F_BARRIER, "barrier.cluster.arrive twice without a wait");
    r->cluster_arrived = 1;
    r->cluster_phase = c->bar_phase;
    if (!relaxed) {
        emu_delay_release(w, 0);
        emu_release_to(w, &c->barrier[0], &r->now, 0);
    } else if (r->has_release) {
        emu_release_to(w, &c->barrier[0], &r->release, 0);
    }
    c->bar_arrived++;
    w->machine->progress++;
    emu_cluster_check(w);
}

int emu_cluster_wait(emu_warp *w, uint32_t mask) {
    emu_run *r = w->run;
    emu_cluster *c = w->cta->cluster;
    (void)mask;
    if (!r->cluster_arrived) {
        emu_finding(w, EMU_F_BARRIER, "barrier.cluster.wait without an arrival");
        return 0;
    }
    if (c->bar_phase == r->cluster_phase) {
        w->cta->grid->counters[EMU_C_BARRIER_WAITS]++;
        return emu_block(w, WAIT_CLUSTER, 0, r->cluster_phase);
    }
    r->cluster_arrived = 0;
    emu_acquire_from(w, &c->barrier[1], &r->now, 0);
    return 0;
}

/* ---- dependent launches */
void emu_dependency_wait(emu_warp *w, uint32_t mask) {
    (void)mask;
    if (!w->run->waited_dependency) w->run->wait_clock = w->run->clock;
    w->run->waited_dependency = 1;
    w->cta->grid->waited = 1;
    emu_tick(w);
}

void emu_launch_dependents(emu_warp *w, uint32_t mask) {
    (void)mask;
    w->cta->launched_dependents = 1;
    if (!emu_after_wait(w)) w->cta->released_early = 1;
}

int emu_poll(emu_warp *w, emu_group *g) {
    switch (g->wait) {
    case WAIT_NONE: return 1;
    case WAIT_BAR: return w->cta->bars[g->a].phase != g->b;
    case WAIT_MBAR: {
        emu_mbar *b = emu_mbar_find(w->cta, g->a & ((1u << EMU_SHARED_RANK_SHIFT) - 1));
        return !b || (b->phase & 1) != g->b;
    }
    case WAIT_CLUSTER: return w->cta->cluster->bar_phase != g->b;
    case WAIT_CONVERGE: return 0;
    default: return 1;
    }
}

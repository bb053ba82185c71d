/* Which warp runs next; clusters come and go; who waits for what when nothing can go on. */
#define _GNU_SOURCE
#include "internal.h"
#include "kernel.h"
#include <stdio.h>
#include <sched.h>
#include <time.h>

static uint64_t next_random(uint64_t *s) {
    uint64_t x = *s += 0x9e3779b97f4a7c15ull;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ x >> 27) * 0x94d049bb133111ebull;
    return x ^ x >> 31;
}

static uint64_t wall_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000ull + (uint64_t)t.tv_nsec;
}

uint64_t emu_time(emu_warp *w) {
    emu_machine *m = w->machine;
    m->time_read++;
    return m->foreign ? wall_ns() : (m->time_ns += 20);
}

/* ---- clusters */
static int before_in_stream(const emu_grid *a, const emu_grid *b) { return a->stream == b->stream && a->index < b->index; }

/* Whether a grid may have another cluster: it has one to come, and the grids before it in its stream are done. */
static int may_admit(emu_machine *m, emu_grid *g) {
    if (g->next_cluster >= g->clusters) return 0;
    for (uint32_t i = 0; i < m->grid_count; i++)
        if (before_in_stream(&m->grids[i], g) && m->grids[i].done_clusters < m->grids[i].clusters) return 0;
    return 1;
}

static emu_warp *new_warp(emu_cta *cta, uint32_t index) {
    emu_grid *g = cta->grid;
    emu_machine *m = g->machine;
    emu_warp *w = calloc(1, sizeof *w);
    emu_run *r = w->run = calloc(1, sizeof *r);
    w->cta = cta;
    w->machine = m;
    w->index = index;
    w->lane = -1;
    uint32_t left = g->threads - index * 32;
    w->threads = left >= 32 ? ~0u : (1u << left) - 1;
    w->params = g->params;
    size_t bytes = (g->register_bytes + 63) & ~63u;
    w->registers = aligned_alloc(64, bytes + 64);
    memset(w->registers, 0xdb, bytes);
    r->agent = cta->rank * g->warps + index;
    r->count = 1;
    r->group[0].mask = w->threads;
    r->rng = next_random(&m->rng);
    emu_clock_new(&r->now, cta->cluster->agents);
    r->clock = 1;
    r->now.local[r->agent] = 1;
    for (uint32_t i = 0; i < m->grid_count; i++) { /* what the stream did before is done and seen */
        const emu_grid *past = &m->grids[i];
        if (!before_in_stream(past, g)) continue;
        if (!r->now.far) r->now.far = calloc(m->batch_agents + 1, 4);
        for (uint32_t k = 0; k < past->agents; k++) r->now.far[past->agent_base + k] = ~0u >> 1;
    }
    if (m->warp_count == m->warp_room) {
        m->warp_room = m->warp_room ? 2 * m->warp_room : 64;
        m->warps = realloc(m->warps, m->warp_room * sizeof *m->warps);
    }
    r->slot = m->warp_count;
    m->warps[m->warp_count++] = w;
    return w;
}

static void free_warp(emu_warp *w) {
    emu_clock_free(&w->run->now);
    emu_clock_free(&w->run->release);
    emu_clock_free(&w->run->acquire);
    free(w->registers);
    free(w->unit);
    free(w->run);
    free(w);
}

static void admit(emu_grid *g) {
    emu_machine *m = g->machine;
    emu_cluster *c = calloc(1, sizeof *c);
    uint64_t n = g->next_cluster++;
    c->grid = g;
    c->size = g->cluster_dims[0] * g->cluster_dims[1] * g->cluster_dims[2];
    c->warps = c->size * g->warps;
    c->agents = c->warps * (1 + EMU_TWINS);
    c->live_warps = c->warps;
    uint64_t room = g->agents / c->agents;
    c->first_agent = g->agent_base + (uint32_t)(n % room) * c->agents;
    c->barrier = calloc(2, sizeof *c->barrier);
    c->ctas = calloc(c->size, sizeof *c->ctas);
    uint64_t at = n;
    for (int d = 0; d < 3; d++) {
        uint32_t across = g->dims[d] / g->cluster_dims[d];
        c->dims[d] = g->cluster_dims[d];
        c->id[d] = (uint32_t)(at % across);
        at /= across;
    }
    for (uint32_t rank = 0; rank < c->size; rank++) {
        emu_cta *cta = c->ctas[rank] = calloc(1, sizeof *cta);
        uint32_t in = rank;
        cta->cluster = c;
        cta->grid = g;
        cta->rank = rank;
        cta->sm = (uint32_t)((n * c->size + rank) % m->sms);
        for (int d = 0; d < 3; d++) {
            cta->id[d] = c->id[d] * g->cluster_dims[d] + in % g->cluster_dims[d];
            in /= g->cluster_dims[d];
        }
        cta->shared_end = EMU_SHARED_BASE + g->shared_bytes;
        size_t bytes = (cta->shared_end + 1023) & ~1023ul;
        cta->shared = aligned_alloc(1024, bytes);
        memset(cta->shared, 0xcb, bytes);
        cta->cells = calloc(g->shared_bytes / 4 + 8, sizeof *cta->cells);
        cta->written = calloc(g->shared_bytes + 8, 1);
        cta->bars = calloc(16, sizeof *cta->bars);
        cta->warp_count = cta->live_warps = g->warps;
        cta->warps = calloc(g->warps, sizeof *cta->warps);
        for (uint32_t i = 0; i < g->warps; i++) cta->warps[i] = new_warp(cta, i);
        for (uint32_t i = 0; i < g->warps && n >= room; i++) { /* recycled agents go on counting */
            emu_run *r = cta->warps[i]->run;
            r->clock = r->now.local[r->agent] = 1 + (uint32_t)(n / room) * 65536u;
        }
    }
    g->resident_count++;
}

static void free_cluster(emu_cluster *c) {
    emu_delay_cluster_ends(c, c->grid->done_clusters + 1 == c->grid->clusters);
    for (uint32_t rank = 0; rank < c->size; rank++) {
        emu_cta *cta = c->ctas[rank];
        if (cta->launched_dependents) c->grid->launched_dependents = 1;
        for (uint32_t i = 0; i < cta->warp_count; i++) {
            if (cta->warps[i]->run->waited_dependency && !cta->released_early) c->grid->released_late = 1;
            free_warp(cta->warps[i]);
        }
        for (int i = 0; i < 16; i++) {
            emu_sync_free(&cta->bars[i].arriving);
            emu_sync_free(&cta->bars[i].done);
        }
        emu_mbar_free(cta);
        free(cta->shared);
        free(cta->cells);
        free(cta->written);
        free(cta->bars);
        free(cta->warps);
        free(cta);
    }
    emu_sync_free(&c->barrier[0]);
    emu_sync_free(&c->barrier[1]);
    free(c->barrier);
    free(c->ctas);
    c->grid->resident_count--;
    c->grid->done_clusters++;
    free(c);
}

static void end_cta(emu_warp *w) {
    emu_cta *cta = w->cta;
    for (emu_mbar *b = cta->mbars; b; b = b->next)
        if (b->initialised && b->tx)
            emu_finding(w, EMU_F_MBARRIER, "the CTA ends while the mbarrier at shared +%d has %lld bytes of transactions %s",
                        (int)(b->offset - EMU_SHARED_BASE), (long long)(b->tx < 0 ? -b->tx : b->tx),
                        b->tx < 0 ? "that nothing expected" : "outstanding");
    if (cta->tmem) emu_tmem_free(w, cta->tmem);
    cta->tmem = NULL;
}

static void end_warp(emu_warp *w) {
    emu_machine *m = w->machine;
    emu_cluster *c = w->cta->cluster;
    emu_run *r = w->run;
    r->finished = 1;
    m->progress++;
    m->warps[r->slot] = m->warps[--m->warp_count];
    m->warps[r->slot]->run->slot = r->slot;
    if (w->queue[EMU_Q_BULK].count && CHECK(m, EMU_F_ASYNC)) {
        uint32_t *known = &r->now.local[c->warps + r->agent * EMU_TWINS + EMU_TWIN_BULK];
        if (*known < w->twin_clock[EMU_TWIN_BULK])
            emu_finding(w, EMU_F_ASYNC, "the thread ends with bulk copies out of shared memory that it has not waited for");
    }
    emu_delay_warp_ends(w);
    if (!--w->cta->live_warps) end_cta(w);
    c->live_warps--;
    emu_bar_check_exit(w);
    emu_cluster_check(w);
    if (!c->live_warps) free_cluster(c);
}

/* ---- nothing can go on */
const char *emu_wait_text(emu_warp *w, emu_group *g, char *out, size_t room) {
    switch (g->wait) {
    case WAIT_BAR: {
        emu_bar *b = &w->cta->bars[g->a];
        snprintf(out, room, "bar.sync %u, where %u of %u warps are", g->a, b->arrived,
                 b->expected ? b->expected / 32 : w->cta->live_warps);
        break;
    }
    case WAIT_MBAR: {
        emu_mbar *b = emu_mbar_find(w->cta, g->a & ((1u << EMU_SHARED_RANK_SHIFT) - 1));
        if (b) snprintf(out, room, "the mbarrier at shared +%d, parity %u (phase %u, %u of %u arrivals and %lld bytes missing)",
                        (int)(b->offset - EMU_SHARED_BASE), g->b, b->phase, b->pending, b->count, (long long)b->tx);
        else snprintf(out, room, "an mbarrier that is gone");
        break;
    }
    case WAIT_CLUSTER: snprintf(out, room, "the cluster barrier, where %u of %u warps are", w->cta->cluster->bar_arrived,
                                w->cta->cluster->live_warps); break;
    case WAIT_CONVERGE: snprintf(out, room, "lanes 0x%08x at a .sync instruction, with lanes 0x%08x there", g->a, g->mask); break;
    case WAIT_UNIT:
        snprintf(out, room, g->a == EMU_FOR_TMEM ? "tensor memory to be freed" : "the other CTA of the pair to execute tcgen05.alloc");
        break;
    default: snprintf(out, room, "nothing: it goes round in a loop"); break;
    }
    return out;
}

static void deadlock(emu_machine *m) {
    for (uint32_t i = 0, told = 0; i < m->warp_count && told < 16; i++) {
        emu_warp *w = m->warps[i];
        for (uint32_t k = 0; k < w->run->count; k++, told++) {
            emu_group *g = &w->run->group[k];
            char text[256];
            w->lane = __builtin_ctz(g->mask);
            w->line = g->line;
            emu_finding(w, EMU_F_DEADLOCK, "no thread can go on; this one waits for %s", emu_wait_text(w, g, text, sizeof text));
        }
    }
    m->stop = 1;
}

/* As many more clusters as there are, as far as the device holds them. */
static int admit_more(emu_machine *m) {
    int any = 0;
    for (uint32_t i = 0; i < m->grid_count; i++) {
        emu_grid *g = &m->grids[i];
        uint32_t wanted = g->resident_count ? g->resident_count : 1;
        for (; wanted && may_admit(m, g) && g->resident_count < g->resident_limit; wanted--, any = 1) admit(g);
    }
    return any;
}

/* Everybody is blocked. 1 if something may go on after all. */
static int unblock(emu_machine *m, uint64_t *seen, uint32_t *rounds) {
    if (*seen != m->progress) *rounds = 0;
    *seen = m->progress;
    if (admit_more(m)) {
        m->progress++;
        return 1;
    }
    if (m->foreign) {
        sched_yield();
        return 1;
    }
    if ((*rounds)++ >= 4) return 0;
    int any = 0;
    for (uint32_t i = 0; i < m->warp_count; i++)
        for (uint32_t k = 0; k < m->warps[i]->run->count; k++)
            if (m->warps[i]->run->group[k].wait == WAIT_MBAR) m->warps[i]->run->group[k].timed_out = any = 1;
            else if (m->warps[i]->run->group[k].wait == WAIT_UNIT) any = 1;
    return any;
}

static int runnable(emu_warp *w) {
    emu_run *r = w->run;
    for (uint32_t i = 0; i < r->count; i++)
        if (!r->group[i].wait || r->group[i].timed_out || emu_poll(w, &r->group[i])) return 1;
    return r->count == 0;
}

/* The next warp to run, NULL if all are blocked. */
static emu_warp *pick(emu_machine *m, uint32_t *cursor) {
    uint32_t n = m->warp_count, start;
    if (m->policy == 0) {
        start = *cursor = (*cursor + 1) % n;
    } else {
        start = (uint32_t)(next_random(&m->rng) % n);
    }
    emu_warp *delayed = NULL;
    for (uint32_t i = 0; i < n; i++) {
        emu_warp *w = m->warps[(start + i) % n];
        if (!runnable(w)) continue;
        /* adversarial: half of the warps, another half every 2^10 slices, run only when no other can */
        if (m->policy == 2) {
            uint64_t h = (w->run->rng >> 8 ^ m->ticks >> 10) * 0x9e3779b97f4a7c15ull;
            if (h >> 63 && m->ticks - w->run->starved < 4096) {
                if (!delayed || w->run->starved < delayed->run->starved) delayed = w;
                continue;
            }
        }
        if (m->policy == 0) *cursor = (start + i) % n;
        w->run->starved = m->ticks;
        return w;
    }
    return delayed;
}

static void advance_time(emu_machine *m, uint64_t idle) {
    m->time_ns += 200;
    if (idle && idle % (16 * (uint64_t)(m->warp_count + 1)) == 0) m->time_ns += m->time_ns >> 2; /* all only wait: hurry */
}

int emu_machine_run(emu_machine *m) {
    uint32_t cursor = 0, rounds = 0;
    uint64_t seen = 0, last = 0, idle = 0;
    for (uint32_t i = 0; i < m->grid_count; i++) {
        emu_grid *g = &m->grids[i];
        while (may_admit(m, g) && (g->cooperative || g->resident_count < m->resident_clusters)) admit(g);
    }
    while (!m->stop) {
        for (uint32_t i = 0; i < m->grid_count; i++) {
            emu_grid *g = &m->grids[i];
            while (may_admit(m, g) && (g->cooperative || g->resident_count < m->resident_clusters)) admit(g);
        }
        if (!m->warp_count) break; /* a grid whose turn has come was admitted above */
        emu_warp *w = pick(m, &cursor);
        if (!w) {
            emu_delay_due(m, ~0ull);
            if (!unblock(m, &seen, &rounds)) deadlock(m);
            continue;
        }
        /* long slices, but short ones while everybody only polls */
        w->run->budget = m->policy == 0 ? (idle > m->warp_count ? 8 : 512) : 1 + (int32_t)(next_random(&m->rng) % (m->policy == 1 ? 24 : 96));
        emu_delay_due(m, ++m->ticks);
        if (w->cta->grid->kernel(w) == EMU_DONE && !m->stop) end_warp(w);
        idle = m->progress == last ? idle + 1 : 0;
        last = m->progress;
        if (!idle) m->time_read = 0;
        advance_time(m, idle);
        if (m->foreign && idle > m->warp_count) sched_yield();
        if (idle > 4ull * (m->warp_count + 2)) emu_delay_due(m, ~0ull); /* whoever polls sees it in the end */
        if (idle > 2ull * (m->warp_count + 2) && !m->foreign && admit_more(m)) { /* they poll for what a CTA to come would write */
            m->progress++;
            continue;
        }
        uint64_t patience = (m->policy == 0 ? 500ull : 2000ull) * (m->warp_count + 4);
        if (idle > patience && !m->foreign && (!m->time_read || idle > 64 * patience)) deadlock(m);
        if ((m->ticks & 1023) == 0 && m->interrupted && m->interrupted()) {
            snprintf(m->fatal, sizeof m->fatal, "interrupted");
            m->stop = 2;
        }
    }
    emu_delay_due(m, ~0ull);
    for (uint32_t i = 0; i < m->warp_count; i++) { /* stopped early: drop what is still there, cluster by cluster */
        emu_cluster *c = m->warps[i]->cta->cluster;
        if (c->live_warps == ~0u) continue;
        c->live_warps = ~0u;
    }
    while (m->warp_count) {
        emu_cluster *c = m->warps[0]->cta->cluster;
        uint32_t kept = 0;
        for (uint32_t i = 0; i < m->warp_count; i++)
            if (m->warps[i]->cta->cluster != c) m->warps[kept++] = m->warps[i];
        m->warp_count = kept;
        for (uint32_t rank = 0; rank < c->size; rank++) {
            free(c->ctas[rank]->tmem);
            c->ctas[rank]->tmem = NULL;
        }
        free_cluster(c);
    }
    return (int)m->stop;
}

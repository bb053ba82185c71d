/* Control flow of one warp: groups of lanes that stand at one block each. The lowest block goes first, so that lanes meet again
 * where the paths do; a group that goes round in a loop for long gives way to the one that has waited longest. */
#include "internal.h"
#include "kernel.h"

#define SPINS 64 /* back edges before others of the warp get their turn */

static void merge(emu_run *r) {
    for (uint32_t i = 0; i < r->count; i++) {
        for (uint32_t j = i + 1; j < r->count;) {
            emu_group *a = &r->group[i], *b = &r->group[j];
            if (a->pc != b->pc || a->entered != b->entered || (a->entered && (a->wait != b->wait || a->b != b->b))) {
                j++;
                continue;
            }
            a->mask |= b->mask;
            a->timed_out |= b->timed_out;
            if (a->wait == WAIT_CONVERGE || b->wait == WAIT_CONVERGE) a->wait = WAIT_NONE;
            else if (!b->wait) a->wait = WAIT_NONE;
            if (r->current == j) r->current = i;
            r->group[j] = r->group[--r->count];
            if (r->current == r->count) r->current = j;
        }
    }
}

uint32_t emu_begin(emu_warp *w) {
    emu_run *r = w->run;
    if (w->machine->stop) return r->result = EMU_BLOCKED, ~0u;
    if (r->count > 1) merge(r);
    if (!r->count) return r->result = EMU_DONE, ~0u;
    if (r->budget <= 0) return r->result = EMU_YIELD, ~0u;
    uint32_t best = ~0u, oldest = ~0u;
    for (uint32_t i = 0; i < r->count; i++) {
        emu_group *g = &r->group[i];
        if (g->wait && !g->timed_out && !emu_poll(w, g)) continue;
        if (best == ~0u || g->pc < r->group[best].pc) best = i;
        if (oldest == ~0u || g->last < r->group[oldest].last) oldest = i;
    }
    if (best == ~0u) return r->result = EMU_BLOCKED, ~0u;
    if (r->group[best].spins > SPINS && oldest != best) {
        r->group[best].spins = SPINS / 2;
        best = oldest;
    }
    emu_group *g = &r->group[best];
    g->wait = WAIT_NONE;
    g->last = ++r->last_run;
    r->current = best;
    w->active = g->mask;
    for (uint32_t i = 0; i < EMU_LANES; i++) r->lanes[i] = g->mask >> i & 1 ? ~0u : 0;
    return g->pc;
}

int emu_result(emu_warp *w) { return (int)w->run->result; }

const uint32_t *emu_active_lanes(emu_warp *w) { return w->run->lanes; }

int emu_jump(emu_warp *w, uint32_t to, int back) {
    emu_run *r = w->run;
    emu_group *g = &r->group[r->current];
    g->pc = to;
    if (back) {
        g->spins++;
        if (--r->budget <= 0) return 0;
    }
    if (r->count == 1) return 1;
    for (uint32_t i = 0; i < r->count; i++)
        if (i != r->current && r->group[i].pc <= to) return 0;
    return g->spins <= SPINS;
}

int emu_branch(emu_warp *w, uint32_t taken, uint32_t to, uint32_t otherwise, uint32_t here) {
    emu_run *r = w->run;
    uint32_t mask = w->active;
    taken &= mask;
    if (taken == mask) return emu_jump(w, to, to <= here) ? 0 : 2;
    if (!taken) return emu_jump(w, otherwise, otherwise <= here) ? 1 : 2;
    emu_group *g = &r->group[r->current], *n = &r->group[r->count++];
    *n = *g;
    g->mask = mask & ~taken;
    g->pc = otherwise;
    n->mask = taken;
    n->pc = to;
    if (to <= here) {
        n->spins++;
        r->budget--;
    }
    return 2;
}

void emu_exit(emu_warp *w, uint32_t mask, uint32_t then) {
    emu_run *r = w->run;
    emu_group *g = &r->group[r->current];
    mask &= w->active;
    w->exited |= mask;
    g->mask &= ~mask;
    g->pc = then;
    if (!g->mask) *g = r->group[--r->count];
    for (uint32_t i = 0; i < r->count; i++)
        if (r->group[i].wait == WAIT_CONVERGE) r->group[i].wait = WAIT_NONE; /* they may have waited for these lanes */
}

int emu_slice(emu_warp *w, uint32_t here) {
    emu_run *r = w->run;
    r->group[r->current].pc = here;
    if (r->budget <= 0) return 1;
    r->budget--;
    return 0;
}

int emu_block(emu_warp *w, uint32_t kind, uint32_t a, uint32_t b) {
    emu_run *r = w->run;
    emu_group *g = &r->group[r->current];
    g->wait = kind;
    g->a = a;
    g->line = w->line;
    g->b = b;
    return 1;
}

int emu_unit_waits(emu_warp *w, uint32_t what) { return emu_block(w, WAIT_UNIT, what, 0); }

int emu_converge(emu_warp *w, uint32_t members, uint32_t aligned) {
    uint32_t live = w->threads & ~w->exited, need = aligned == 1 ? live : members & live;
    emu_group *g = &w->run->group[w->run->current];
    if (g->entered) return 0;
    if (aligned == 0 && (w->active & ~members))
        emu_finding(w, EMU_F_BARRIER, "lanes 0x%08x execute a .sync instruction whose member mask is 0x%08x", w->active, members);
    if ((w->active & need) == need) {
        emu_tick(w);
        return 0;
    }
    return emu_block(w, WAIT_CONVERGE, need, 0);
}

void emu_instructions(emu_warp *w, uint32_t count) { w->cta->grid->counters[EMU_C_INSTRUCTIONS] += count; }

void emu_count(emu_warp *w, emu_counter counter, uint64_t amount) { w->cta->grid->counters[counter] += amount; }

void emu_unassigned(emu_warp *w, uint32_t mask, const char *name) {
    if (!mask) return;
    w->lane = __builtin_ctz(mask);
    emu_finding(w, EMU_F_UNINIT, "reads register %s, which this thread has never written", name);
    w->lane = -1;
}

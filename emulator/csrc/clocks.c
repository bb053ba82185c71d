/* Happens-before: clocks of warps and of their asynchronous twins, and the variables through which they pass. */
#include "internal.h"
#include "kernel.h"

static void raise_to(uint32_t *to, const uint32_t *from, uint32_t n) {
    for (uint32_t i = 0; i < n; i++) to[i] = to[i] > from[i] ? to[i] : from[i];
}

void emu_clock_new(emu_clock *c, uint32_t agents) {
    c->local = calloc(2 * (size_t)agents + 1, 4);
    c->proxy = c->local + agents;
    c->far = NULL;
}

void emu_clock_free(emu_clock *c) {
    free(c->local);
    free(c->far);
    memset(c, 0, sizeof *c);
}

static void need_far(emu_machine *m, emu_clock *c) {
    if (!c->far) c->far = calloc(m->batch_agents + 1, 4);
}

void emu_join(emu_machine *m, emu_span to_of, emu_clock *to, emu_span from_of, const emu_clock *from) {
    if (to_of.first == from_of.first) {
        raise_to(to->local, from->local, to_of.count);
        raise_to(to->proxy, from->proxy, to_of.count);
    } else {
        need_far(m, to);
        raise_to(to->far + from_of.first, from->local, from_of.count);
    }
    if (from->far) {
        need_far(m, to);
        raise_to(to->far, from->far, m->batch_agents);
    }
    if (to->far) raise_to(to->local, to->far + to_of.first, to_of.count);
}

/* What the warp does from here on is not covered by what it released before. */
void emu_tick(emu_warp *w) {
    emu_run *r = w->run;
    r->now.local[r->agent] = ++r->clock;
}

emu_sync *emu_sync_at(emu_machine *m, uint64_t key, int create) {
    emu_sync **at = &m->syncs[(key * 0x9e3779b97f4a7c15ull) >> 52];
    for (; *at; at = &(*at)->next)
        if ((*at)->key == key) return *at;
    if (!create) return NULL;
    *at = calloc(1, sizeof **at);
    (*at)->key = key;
    return *at;
}

void emu_sync_free(emu_sync *s) { emu_clock_free(&s->clock); }

void emu_release_to(emu_warp *w, emu_sync *s, const emu_clock *what, uint32_t cta_scope) {
    emu_machine *m = w->machine;
    emu_span of = emu_span_of(w->cta->cluster);
    if (!s->clock.local) {
        emu_clock_new(&s->clock, of.count);
        s->of = of;
    }
    emu_join(m, s->of, &s->clock, of, what);
    s->cta_scope = cta_scope;
    s->cta = w->cta;
    if (what == &w->run->now) emu_tick(w);
}

void emu_acquire_from(emu_warp *w, emu_sync *s, emu_clock *into, uint32_t cta_scope) {
    if (!s->clock.local) return;
    if ((s->cta_scope || cta_scope) && s->cta != w->cta) return; /* scopes do not include each other's thread */
    emu_join(w->machine, emu_span_of(w->cta->cluster), into, s->of, &s->clock);
}

void emu_fence(emu_warp *w, uint32_t scope, uint32_t sides) {
    emu_run *r = w->run;
    emu_machine *m = w->machine;
    emu_span of = emu_span_of(w->cta->cluster);
    if ((sides & FENCE_ACQUIRE) && r->has_acquire) emu_join(m, of, &r->now, of, &r->acquire);
    if (sides & FENCE_RELEASE) {
        emu_delay_release(w, scope == SCOPE_CTA);
        if (!r->release.local) emu_clock_new(&r->release, of.count);
        emu_join(m, of, &r->release, of, &r->now);
        r->has_release = 1;
    }
    emu_tick(w);
}

void emu_fence_proxy(emu_warp *w) {
    emu_run *r = w->run;
    emu_delay_release(w, 0);
    raise_to(r->now.proxy, r->now.local, w->cta->cluster->agents);
    emu_tick(w);
}

/* ---- asynchronous operations */
static uint32_t twin_agent(emu_warp *w, uint32_t twin) {
    return w->cta->cluster->warps + (w->run->agent * EMU_TWINS + twin);
}

void emu_async_begin(emu_warp *w, uint32_t twin) {
    w->twin = twin;
    w->run->twin = twin_agent(w, twin);
    w->twin_clock[twin]++;
}

emu_stamp emu_now(emu_warp *w, uint32_t access) {
    emu_run *r = w->run;
    if (access & (EMU_ASYNC | EMU_BY_TWIN)) return (emu_stamp){r->twin, w->twin_clock[w->twin]};
    return (emu_stamp){r->agent, r->clock};
}

int emu_ordered(emu_warp *w, emu_stamp s, uint32_t access) {
    emu_run *r = w->run;
    if (!s.clock || s.agent == r->agent) return 1;
    if ((access & (EMU_ASYNC | EMU_BY_TWIN)) && s.agent == r->twin) return 1;
    return r->now.local[s.agent] >= s.clock;
}

void emu_async_join(emu_warp *w, emu_queue q) { w->queue[q].open = w->twin_clock[q]; }

void emu_async_commit(emu_warp *w, emu_queue q) {
    uint32_t n = w->queue[q].count;
    if (n == EMU_GROUPS) { /* the oldest is waited for no more: forget it */
        memmove(w->queue[q].clock, w->queue[q].clock + 1, 4 * (EMU_GROUPS - 1));
        n--;
    }
    w->queue[q].clock[n] = w->twin_clock[q];
    w->queue[q].count = n + 1;
}

void emu_async_wait(emu_warp *w, emu_queue q, uint32_t pending) {
    uint32_t n = w->queue[q].count;
    if (n <= pending) return;
    uint32_t *known = &w->run->now.local[twin_agent(w, q)], done = w->queue[q].clock[n - pending - 1];
    if (*known < done) *known = done;
    memmove(w->queue[q].clock, w->queue[q].clock + (n - pending), 4 * pending);
    w->queue[q].count = pending;
    emu_tick(w);
}

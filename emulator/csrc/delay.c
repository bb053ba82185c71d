/* Stores that others see late. Under the adversarial schedule a weak or relaxed store may be under way for a seeded number of
 * slices, while later ones overtake it: memory changes when it arrives. It arrives at once where the memory model wants it seen,
 * and before whoever it is ordered before touches the place again, so that a thread sees its own stores and those to one place
 * stay in order. Whom it is ordered before grows: first its warp; with a barrier of the CTA, or a release or fence of CTA scope, the
 * CTA; with the end of its grid, the grids behind it in the stream. A release or fence of wider scope by one of those brings it
 * in. Elements of a vector are separate stores, as the ISA has it. All arrive at the end of the batch, and when everybody only
 * polls. */
#include "internal.h"
#include "kernel.h"

#define ROOM 512   /* stores under way; with one more a random one arrives */
#define LONGEST 7  /* they take up to 2^LONGEST slices, all powers alike */

struct emu_delayed {
    emu_warp *owner; /* NULL: it has ended */
    emu_cta *cta;    /* the owner's once it is ordered before that; only compared */
    emu_cluster *shared; /* it goes to shared memory of this cluster */
    uint32_t grid, stream, ended; /* ended: the grid has */
    uint32_t bytes, strong, cta_scope;
    uint8_t *to, data[8];
    uint64_t until, key;
    emu_clock release; /* what it releases, if its owner has ended */
    emu_span of;
};

static uint32_t draw(emu_run *r, uint32_t below) {
    r->rng = r->rng * 6364136223846793005ull + 1442695040888963407ull;
    return (uint32_t)(((r->rng >> 33) * below) >> 31);
}

static void arrive(emu_machine *m, uint32_t i) {
    emu_delayed d = m->delayed[i];
    m->delayed[i] = m->delayed[--m->delayed_count];
    if (!d.owner || d.cta) m->delayed_wide--;
    if (d.owner) {
        d.owner->run->delayed--;
        if (d.strong && d.owner->run->has_release)
            emu_release_to(d.owner, emu_sync_at(m, d.key, 1), &d.owner->run->release, d.cta_scope);
    } else if (d.release.local) {
        emu_sync *s = emu_sync_at(m, d.key, 1);
        if (!s->clock.local) {
            emu_clock_new(&s->clock, d.of.count);
            s->of = d.of;
        }
        emu_join(m, s->of, &s->clock, d.of, &d.release);
        s->cta_scope = d.cta_scope;
        s->cta = NULL;
        emu_clock_free(&d.release);
    }
    if (memcmp(d.to, d.data, d.bytes)) {
        memcpy(d.to, d.data, d.bytes);
        m->progress++;
    }
}

int emu_delay(emu_warp *w, const emu_access *a, uint64_t key, uint8_t *to, const uint8_t *data, int first) {
    emu_machine *m = w->machine;
    emu_run *r = w->run;
    if (m->policy != 2 || m->foreign || a->sem > SEM_RELAXED) return 0;
    if (first) r->delays = draw(r, 2); /* half of the instructions, and of those half of the elements */
    if (!r->delays || draw(r, 2)) return 0;
    if (!m->delayed) m->delayed = malloc(ROOM * sizeof *m->delayed);
    if (m->delayed_count == ROOM) arrive(m, draw(r, ROOM));
    int global = a->space == SPACE_GLOBAL || (a->space == SPACE_GENERIC && emu_find_region(m, (uint64_t)(uintptr_t)to, 1));
    emu_delayed *d = &m->delayed[m->delayed_count++];
    *d = (emu_delayed){.owner = w, .grid = w->cta->grid->index, .stream = w->cta->grid->stream, .to = to, .bytes = a->bytes,
                       .strong = a->sem != SEM_WEAK, .cta_scope = a->scope == SCOPE_CTA, .key = key};
    if (!global) d->shared = w->cta->cluster;
    d->until = m->ticks + 1 + draw(r, 1u << draw(r, LONGEST + 1));
    memcpy(d->data, data, a->bytes);
    r->delayed++;
    if (d->until < m->due || m->delayed_count == 1) m->due = d->until;
    return 1;
}

/* Whether a store is ordered before what the warp does now. */
static int precedes(const emu_delayed *d, emu_warp *w) {
    return d->owner == w || d->cta == w->cta || (d->ended && d->stream == w->cta->grid->stream);
}

void emu_delay_touch(emu_warp *w, const uint8_t *at, uint64_t bytes) {
    emu_machine *m = w->machine;
    if (!w->run->delayed && !m->delayed_wide) return;
    for (uint32_t i = m->delayed_count; i--;) {
        const emu_delayed *d = &m->delayed[i];
        if (d->to < at + bytes && at < d->to + d->bytes && precedes(d, w)) arrive(m, i);
    }
}

void emu_delay_release(emu_warp *w, uint32_t cta_scope) {
    emu_machine *m = w->machine;
    if (!w->run->delayed && (cta_scope || !m->delayed_wide)) return;
    for (uint32_t i = m->delayed_count; i--;) {
        emu_delayed *d = &m->delayed[i];
        if (!cta_scope) {
            if (precedes(d, w)) arrive(m, i);
        } else if (d->owner == w && !d->cta) {
            /* a strong one behind a fence releases what the warp's last fence covers, which is about to grow */
            if (d->shared || (d->strong && w->run->has_release)) {
                arrive(m, i);
            } else {
                d->cta = w->cta;
                m->delayed_wide++;
            }
        }
    }
}

void emu_delay_due(emu_machine *m, uint64_t now) {
    if (!m->delayed_count || now < m->due) return;
    uint64_t next = ~0ull;
    for (uint32_t i = m->delayed_count; i--;) {
        if (m->delayed[i].until <= now) arrive(m, i);
        else if (m->delayed[i].until < next) next = m->delayed[i].until;
    }
    m->due = next;
}

void emu_delay_warp_ends(emu_warp *w) {
    emu_machine *m = w->machine;
    emu_run *r = w->run;
    for (uint32_t i = m->delayed_count; r->delayed && i--;) {
        emu_delayed *d = &m->delayed[i];
        if (d->owner != w) continue;
        if (d->strong && r->has_release) {
            d->of = emu_span_of(w->cta->cluster);
            emu_clock_new(&d->release, d->of.count);
            emu_join(m, d->of, &d->release, d->of, &r->release);
        }
        if (!d->cta) m->delayed_wide++;
        d->owner = NULL;
        r->delayed--;
    }
}

void emu_delay_cluster_ends(emu_cluster *c, int grid_too) {
    emu_machine *m = c->grid->machine;
    for (uint32_t i = m->delayed_count; i--;) {
        if (m->delayed[i].shared == c) arrive(m, i);
        else if (grid_too && m->delayed[i].grid == c->grid->index) m->delayed[i].ended = 1;
    }
}

/* What Python calls: a machine, its memory, one batch of grids at a time, findings. */
#include "internal.h"
#include <stdarg.h>
#include <stdio.h>

emu_machine *emu_machine_new(void) {
    emu_machine *m = calloc(1, sizeof *m);
    m->time_ns = 1000000000ull;
    m->sms = 132;
    return m;
}

void emu_machine_configure(emu_machine *m, uint32_t checks, uint32_t policy, uint64_t seed, uint32_t resident, uint32_t sms,
                           uint32_t stop_at_first, int (*interrupted)(void)) {
    m->checks = checks;
    m->policy = policy;
    m->rng = seed * 0x9e3779b97f4a7c15ull + 12345;
    m->resident_clusters = resident;
    m->sms = sms;
    m->stop_at_first = stop_at_first;
    m->interrupted = interrupted;
}

static void drop_regions(emu_region **list, uint32_t *count) {
    for (uint32_t i = 0; i < *count; i++) emu_region_free(&(*list)[i]);
    free(*list);
    *list = NULL;
    *count = 0;
}

/* Regions are sorted by address and disjoint. written[i]: one byte a byte, or 0. */
void emu_machine_memory(emu_machine *m, uint32_t count, const uint64_t *lo, const uint64_t *hi, const uint32_t *flags,
                        uint8_t *const *written, const char *const *names) {
    drop_regions(&m->regions, &m->region_count);
    m->regions = calloc(count + 1, sizeof *m->regions);
    m->names = realloc(m->names, (count + 1) * sizeof *m->names);
    m->region_count = count;
    m->last_region = 0;
    m->foreign = 0;
    for (uint32_t i = 0; i < count; i++) {
        m->regions[i] = (emu_region){.lo = lo[i], .hi = hi[i], .flags = flags[i], .name = i, .written = written[i]};
        snprintf(m->names[i], sizeof *m->names, "%s", names[i]);
        if (flags[i] & REGION_FOREIGN) m->foreign = 1;
    }
}

/* Adds a grid to the batch; returns its index. integers: grid, block, cluster (3 each), static + dynamic shared bytes, dynamic shared
 * bytes, register bytes, cooperative, dependent, parameter bytes, most clusters at a time, stream. */
uint32_t emu_machine_grid(emu_machine *m, emu_kernel kernel, const char *name, const uint32_t *i, const uint8_t *params) {
    m->grids = realloc(m->grids, (m->grid_count + 1) * sizeof *m->grids);
    emu_grid *g = &m->grids[m->grid_count];
    memset(g, 0, sizeof *g);
    g->machine = m;
    g->kernel = kernel;
    g->clusters = 1;
    for (int d = 0; d < 3; d++) {
        g->dims[d] = i[d];
        g->block[d] = i[3 + d];
        g->cluster_dims[d] = i[6 + d];
        g->clusters *= i[d] / i[6 + d];
    }
    g->shared_bytes = i[9];
    g->dynamic_bytes = i[10];
    g->register_bytes = i[11];
    g->cooperative = i[12];
    g->dependent = i[13];
    g->params = params;
    g->param_bytes = i[14];
    g->resident_limit = i[15];
    g->stream = i[16];
    g->threads = i[3] * i[4] * i[5];
    g->warps = (g->threads + 31) / 32;
    g->index = m->grid_count;
    snprintf(g->name, sizeof g->name, "%s", name);
    uint64_t per = (uint64_t)(i[6] * i[7] * i[8]) * g->warps * (1 + EMU_TWINS), room = (MAX_AGENTS / 2) / per;
    g->agents = (uint32_t)(per * (g->clusters < room ? g->clusters : room));
    g->agent_base = m->batch_agents;
    m->batch_agents += g->agents;
    return m->grid_count++;
}

void emu_machine_counters(emu_machine *m, uint32_t grid, uint64_t *out) {
    memcpy(out, m->grids[grid].counters, sizeof m->grids[grid].counters);
}

/* Bytes and sectors read, bytes and sectors written, by region. */
void emu_machine_traffic(emu_machine *m, uint32_t grid, uint64_t *out) {
    const emu_traffic *t = m->grids[grid].traffic;
    for (uint32_t i = 0; i < m->region_count; i++)
        for (int k = 0; k < 2; k++) {
            out[4 * i + 2 * k] = t ? t[i].bytes[k] : 0;
            out[4 * i + 2 * k + 1] = t ? t[i].sectors[k] : 0;
        }
}

/* At the end of a batch: whether a later launch may begin beside this grid of it. */
static uint32_t stays_open(const emu_machine *m, const emu_grid *g) {
    for (uint32_t i = g->index + 1; i < m->grid_count; i++)
        if (m->grids[i].stream == g->stream && emu_holds_back(&m->grids[i])) return 0;
    return g->launched_dependents;
}

/* Keeps of a mark what a grid made that stays open. */
static void keep_open(const emu_machine *m, uint32_t *tag) {
    for (uint32_t i = 0; *tag && i < m->grid_count; i++) {
        const emu_grid *g = &m->grids[i];
        if (TAG_AGENT(*tag) - g->agent_base < g->agents && !g->open) *tag = 0;
    }
}

#define PAST 2 /* batches that are kept */

/* After a batch: forgets it, keeps what a dependent launch has yet to wait for. */
void emu_machine_reset(emu_machine *m) {
    int held_back = 1, dependents = 0, all_open = 1;
    for (uint32_t i = 0; i < m->grid_count; i++) {
        emu_traffic *t = m->grids[i].traffic;
        for (uint32_t k = 0; t && k < 2 * m->region_count; k++) free(t[k / 2].seen[k % 2]);
        free(t);
    }
    for (uint32_t i = 0; i < m->grid_count; i++) {
        int stream_held_back = 0; /* on each stream a grid has to */
        for (uint32_t k = 0; k < m->grid_count; k++)
            stream_held_back |= m->grids[k].stream == m->grids[i].stream && emu_holds_back(&m->grids[k]);
        held_back &= stream_held_back;
        m->grids[i].open = stays_open(m, &m->grids[i]);
        dependents |= m->grids[i].open;
        all_open &= m->grids[i].open;
    }
    uint32_t kept = 0;
    for (uint32_t i = 0; i < m->past_count; i++) {
        if (held_back || ++m->past[i].age == PAST) emu_region_free(&m->past[i]);
        else m->past[kept++] = m->past[i];
    }
    m->past_count = kept;
    if (dependents) {
        m->past = realloc(m->past, (m->past_count + m->region_count + 1) * sizeof *m->past);
        for (uint32_t i = 0; i < m->region_count; i++)
            if (m->regions[i].cells) {
                emu_region *r = &m->past[m->past_count++];
                *r = m->regions[i];
                for (uint64_t at = r->lo & ~3ull; at < r->hi && !all_open; at += 4) {
                    emu_cell *c = &r->cells[(at - (r->lo & ~3ull)) / 4];
                    keep_open(m, &c->write_tag);
                    keep_open(m, &c->read_tag);
                }
                r->copy = malloc(r->hi - r->lo);
                if (r->copy) memcpy(r->copy, (void *)(uintptr_t)r->lo, r->hi - r->lo);
            }
        free(m->regions);
        m->regions = NULL;
        m->region_count = 0;
    }
    drop_regions(&m->regions, &m->region_count);
    for (int i = 0; i < SYNC_BUCKETS; i++) {
        for (emu_sync *s = m->syncs[i], *next; s; s = next) {
            next = s->next;
            emu_sync_free(s);
            free(s);
        }
        m->syncs[i] = NULL;
    }
    free(m->grids);
    m->grids = NULL;
    m->grid_count = m->batch_agents = m->stop = m->finding_count = 0;
    m->fatal[0] = 0;
}

/* The stream has drained: the next launch depends on nothing. */
void emu_machine_drain(emu_machine *m) { drop_regions(&m->past, &m->past_count); }

void emu_machine_free(emu_machine *m) {
    emu_machine_reset(m);
    emu_machine_drain(m);
    free(m->findings);
    free(m->names);
    free(m->warps);
    free(m->delayed);
    free(m);
}

uint32_t emu_machine_findings(emu_machine *m) { return m->finding_count; }
const emu_finding_record *emu_machine_finding(emu_machine *m, uint32_t i) { return &m->findings[i]; }
const char *emu_machine_fatal(emu_machine *m) { return m->fatal; }

void emu_finding(emu_warp *w, emu_category category, const char *format, ...) {
    emu_machine *m = w->machine;
    if (!CHECK(m, category)) return;
    for (uint32_t i = 0; i < m->finding_count; i++) /* one record a place */
        if (m->findings[i].category == (uint32_t)category && m->findings[i].line == w->line &&
            m->findings[i].grid == w->cta->grid->index && category != EMU_F_DEADLOCK) {
            m->findings[i].count++;
            return;
        }
    if (m->finding_count == 256) return;
    if (m->finding_count == m->finding_room) {
        m->finding_room = m->finding_room ? 2 * m->finding_room : 16;
        m->findings = realloc(m->findings, m->finding_room * sizeof *m->findings);
    }
    emu_finding_record *f = &m->findings[m->finding_count++];
    *f = (emu_finding_record){category, w->line, w->lane < 0 ? ~0u : (uint32_t)w->lane, w->index,
                              {w->cta->id[0], w->cta->id[1], w->cta->id[2]}, w->cta->grid->index, 1, ""};
    va_list rest;
    va_start(rest, format);
    vsnprintf(f->text, sizeof f->text, format, rest);
    va_end(rest);
    if (m->stop_at_first && category != EMU_F_DEADLOCK) m->stop = 1;
}

void emu_fatal(emu_warp *w, const char *format, ...) {
    emu_machine *m = w->machine;
    if (m->stop == 2) return;
    va_list rest;
    va_start(rest, format);
    int n = snprintf(m->fatal, sizeof m->fatal, "PTX line %u: ", w->line);
    vsnprintf(m->fatal + n, sizeof m->fatal - (size_t)n, format, rest);
    va_end(rest);
    m->stop = 2;
}

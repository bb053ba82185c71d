/* Memory: which bytes exist, which were written, who touched them last. */
#define _GNU_SOURCE
#include "internal.h"
#include <stdio.h>
#include <sys/mman.h>

static uint64_t cells_bytes(const emu_region *r) { return ((r->hi - (r->lo & ~3ull)) / 4 + 2) * sizeof(emu_cell); }

emu_region *emu_find_region(emu_machine *m, uint64_t lo, uint64_t bytes) {
    if (!m->region_count) return NULL;
    emu_region *r = &m->regions[m->last_region];
    if (lo >= r->lo && lo + bytes <= r->hi) return r;
    uint32_t a = 0, b = m->region_count; /* sorted, disjoint */
    while (a < b) {
        uint32_t mid = (a + b) / 2;
        if (m->regions[mid].hi <= lo) a = mid + 1;
        else b = mid;
    }
    if (a == m->region_count || lo < m->regions[a].lo || lo + bytes > m->regions[a].hi) return NULL;
    m->last_region = a;
    return &m->regions[a];
}

static const char *name_agent(emu_warp *w, uint32_t agent, uint32_t lane, int shared, char *out, size_t room) {
    emu_cluster *c = w->cta->cluster;
    uint32_t local = shared ? agent : agent - c->first_agent, twin = 0;
    if (!shared && (agent < c->first_agent || local >= c->agents)) {
        snprintf(out, room, "another cluster or grid");
        return out;
    }
    if (local >= c->warps) {
        twin = 1;
        local = (local - c->warps) / EMU_TWINS;
    }
    uint32_t per = w->cta->warp_count, rank = local / per, warp = local % per;
    if (twin) snprintf(out, room, "an asynchronous operation of warp %u%s", warp, rank == w->cta->rank ? "" : " of another CTA");
    else snprintf(out, room, "thread %u%s", warp * 32 + lane, rank == w->cta->rank ? "" : " of another CTA of the cluster");
    return out;
}

/* Whether the access that a tag and clock stand for is ordered before the present one. 2: ordered, but a generic write that
 * the asynchronous proxy may not see. */
static int ordered(emu_warp *w, uint32_t tag, uint32_t clock, uint32_t access, int shared, int earlier_is_write) {
    emu_run *r = w->run;
    emu_cluster *c = w->cta->cluster;
    uint32_t agent = TAG_AGENT(tag), async = access & (EMU_ASYNC | EMU_BY_TWIN);
    uint32_t local = shared ? agent : agent - c->first_agent;
    int near = shared || (agent >= c->first_agent && local < c->agents);
    if (!near) return r->now.far ? r->now.far[agent] >= clock : 0;
    if (async && local == r->twin && clock == w->twin_clock[w->twin]) return 1; /* the same operation */
    if (local == r->agent) {
        if (clock == r->clock && w->lane >= 0 && TAG_LANE(tag) != (uint32_t)w->lane && !async) return 0;
    } else if (r->now.local[local] < clock) {
        return 0;
    }
    if ((access & EMU_ASYNC) && earlier_is_write && !(tag & TAG_ASYNC) && r->now.proxy[local] < clock) return 2;
    return 1;
}

typedef struct {
    const char *what;
    uint64_t at;
    int shared;
    const char *name;
} place;

static void conflict(emu_warp *w, const place *p, uint32_t tag, uint32_t access, const char *earlier, int how) {
    char who[96];
    name_agent(w, TAG_AGENT(tag), TAG_LANE(tag), p->shared, who, sizeof who);
    const char *now = access & EMU_WRITE ? "writes" : "reads";
    if (how == 2)
        emu_finding(w, EMU_F_PROXY, "the asynchronous proxy %s %s +%llu, written through the generic proxy by %s, without "
                    "fence.proxy.async in between", now, p->name, (unsigned long long)p->at, who);
    else
        emu_finding(w, EMU_F_RACE, "%s%s %s +%llu, %s by %s, with nothing that orders the two",
                    access & (EMU_ASYNC | EMU_BY_TWIN) ? "an asynchronous operation " : "", now, p->name,
                    (unsigned long long)p->at, earlier, who);
}

static int shadow(emu_warp *w, emu_cell *cells, uint64_t at, uint64_t bytes, uint32_t access, int shared, const char *name) {
    emu_run *r = w->run;
    uint32_t async = access & (EMU_ASYNC | EMU_BY_TWIN);
    uint32_t agent = async ? r->twin : r->agent, clock = async ? w->twin_clock[w->twin] : r->clock;
    if (!shared) agent += w->cta->cluster->first_agent;
    uint32_t base = agent << 12 | (w->lane >= 0 ? (uint32_t)w->lane : 0) << 7 | TAG_VALID;
    if (access & EMU_ATOMIC) base |= TAG_ATOMIC;
    if (access & EMU_ASYNC) base |= TAG_ASYNC;
    int bad = 0;
    uint64_t end = at + bytes;
    for (uint64_t cell = at / 4; cell * 4 < end; cell++) {
        uint32_t low = cell * 4 < at ? at & 3 : 0, high = cell * 4 + 4 > end ? end - cell * 4 : 4;
        uint32_t mask = (0xfu << low) & (0xfu >> (4 - high)), tag = base | mask << 3;
        emu_cell *c = &cells[cell];
        if (c->write_tag && (c->write_tag != base || c->write_clock != clock) && (TAG_BYTES(c->write_tag) & mask) && !bad &&
            !(access & c->write_tag & TAG_ATOMIC)) {
            int how = ordered(w, c->write_tag, c->write_clock, access, shared, 1);
            if (how != 1) {
                place p = {"", cell * 4, shared, name};
                conflict(w, &p, c->write_tag, access, "written", how);
                bad = 1;
            }
        }
        if (access & EMU_WRITE) {
            if (c->read_tag && (TAG_BYTES(c->read_tag) & mask) && !bad && !(access & c->read_tag & TAG_ATOMIC)) {
                if (ordered(w, c->read_tag, c->read_clock, access, shared, 0) == 0) {
                    place p = {"", cell * 4, shared, name};
                    conflict(w, &p, c->read_tag, access, "read", 0);
                    bad = 1;
                }
            }
            if (c->write_tag && c->write_clock == clock && (c->write_tag | 0x78u) == (tag | 0x78u)) tag |= c->write_tag & 0x78u;
            c->write_tag = tag;
            c->write_clock = clock;
        }
        if (access & EMU_READ) {
            /* one reader is remembered: one that the present one is ordered after is not worth keeping, of two others the later
             * replaces the earlier every other time */
            if (!c->read_tag || ((c->read_tag ^ tag) >> 12) == 0 || (r->rng & 1) ||
                ordered(w, c->read_tag, c->read_clock, access & ~EMU_ASYNC, shared, 0)) {
                c->read_tag = tag;
                c->read_clock = clock;
            }
            r->rng = r->rng * 6364136223846793005ull + 1442695040888963407ull;
        }
    }
    return bad;
}

int emu_shadow_global(emu_warp *w, emu_region *r, uint64_t address, uint64_t bytes, uint32_t access) {
    emu_machine *m = w->machine;
    if ((!CHECK(m, EMU_F_RACE) && !CHECK(m, EMU_F_PDL)) || (r->flags & REGION_FOREIGN)) return 0;
    if (!r->cells) {
        r->cells = mmap(NULL, cells_bytes(r), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (r->cells == MAP_FAILED) {
            r->cells = NULL;
            emu_fatal(w, "no memory for the shadow of a region of %llu bytes", (unsigned long long)(r->hi - r->lo));
            return 0;
        }
    }
    return shadow(w, r->cells, address - (r->lo & ~3ull), bytes, access, 0, emu_region_name(w->machine, r->name));
}

int emu_shadow_shared(emu_warp *w, emu_cta *cta, uint32_t offset, uint32_t bytes, uint32_t access) {
    if (!CHECK(w->machine, EMU_F_RACE) && !CHECK(w->machine, EMU_F_PROXY)) return 0;
    return shadow(w, cta->cells, offset - EMU_SHARED_BASE, bytes, access, 1,
                  cta == w->cta ? "shared memory" : "shared memory of another CTA");
}

void emu_region_free(emu_region *r) {
    if (r->cells) munmap(r->cells, cells_bytes(r));
    r->cells = NULL;
    free(r->copy);
    r->copy = NULL;
}

const char *emu_region_name(emu_machine *m, uint32_t name) { return m->names[name]; }

/* Whether this warp waited for the launches before, or is ordered after a warp of the cluster that did. */
int emu_after_wait(emu_warp *w) {
    if (w->run->waited_dependency) return 1;
    emu_cluster *c = w->cta->cluster;
    for (uint32_t rank = 0; rank < c->size; rank++) {
        for (uint32_t i = 0; i < c->ctas[rank]->warp_count; i++) {
            const emu_run *r = c->ctas[rank]->warps[i]->run;
            if (r->waited_dependency && w->run->now.local[r->agent] > r->wait_clock) return 1;
        }
    }
    return 0;
}

/* Whether a grid that began without waiting may run beside an agent of the batch, or (~0) beside the launches before the batch:
 * beside its predecessor if that let it begin, and beside those before it as long as none was complete only behind its wait. */
static int beside(const emu_grid *g, uint32_t agent) {
    for (uint32_t i = g->index; i--;) {
        const emu_grid *p = &g->machine->grids[i];
        if (p->stream != g->stream) continue;
        if (agent - p->agent_base < p->agents) return p->launched_dependents;
        if (emu_holds_back(p)) return 0;
    }
    return agent == ~0u;
}

static void too_early(emu_warp *w, const emu_region *r, uint64_t at, uint32_t access, int written) {
    const char *did = access & EMU_WRITE ? "writes" : "reads";
    emu_finding(w, EMU_F_PDL, "%s %s +%llu, which a kernel before %s, ahead of griddepcontrol.wait", did,
                emu_region_name(w->machine, r->name), (unsigned long long)(at - r->lo), written ? "wrote" : "reads");
}

/* Memory that the launch before wrote, in a dependent launch that has not waited. */
static void check_dependency(emu_warp *w, const emu_region *now, uint64_t address, uint64_t bytes, uint32_t access) {
    emu_machine *m = w->machine;
    const emu_grid *g = w->cta->grid;
    if (!g->dependent || (!m->past_count && !g->index) || !CHECK(m, EMU_F_PDL) || emu_after_wait(w)) return;
    for (uint64_t at = address & ~3ull; g->index && now->cells && at < address + bytes; at += 4) {
        const emu_cell *c = &now->cells[(at - (now->lo & ~3ull)) / 4];
        int wrote = c->write_tag && beside(g, TAG_AGENT(c->write_tag));
        if (wrote || ((access & EMU_WRITE) && c->read_tag && beside(g, TAG_AGENT(c->read_tag)))) {
            too_early(w, now, at, access, wrote);
            return;
        }
    }
    for (uint32_t i = 0; i < m->past_count && beside(g, ~0u); i++) {
        const emu_region *r = &m->past[i];
        uint64_t lo = address > r->lo ? address : r->lo, hi = address + bytes < r->hi ? address + bytes : r->hi;
        for (uint64_t at = lo & ~3ull; at < hi; at += 4) {
            const emu_cell *c = &r->cells[(at - (r->lo & ~3ull)) / 4];
            if (!c->write_tag && !((access & EMU_WRITE) && c->read_tag)) continue;
            if (r->copy && at >= r->lo && at + 4 <= r->hi && memcmp(r->copy + (at - r->lo), (void *)(uintptr_t)at, 4)) continue;
            too_early(w, now, at, access, c->write_tag != 0);
            return;
        }
    }
}

/* A sector counts once for a grid and region, as read or, by stores, atomics and reductions, as written. */
static void count_traffic(emu_warp *w, const emu_region *r, uint64_t address, uint64_t bytes, uint32_t access) {
    emu_grid *g = w->cta->grid;
    emu_machine *m = w->machine;
    int written = (access & EMU_WRITE) != 0;
    if ((access & EMU_AGAIN) || !bytes) return;
    if (!g->traffic) g->traffic = calloc(m->region_count, sizeof *g->traffic);
    emu_traffic *t = &g->traffic[r - m->regions];
    uint64_t base = r->lo >> 5, first = (address >> 5) - base, last = ((address + bytes - 1) >> 5) - base, fresh = 0;
    if (!t->seen[written]) t->seen[written] = calloc(((r->hi - 1) >> 5) - base + 8, 1);
    for (uint64_t s = first; s <= last; s++) {
        uint8_t *at = &t->seen[written][s >> 3], bit = (uint8_t)(1u << (s & 7));
        fresh += !(*at & bit);
        *at |= bit;
    }
    t->bytes[written] += bytes;
    t->sectors[written] += fresh;
    g->counters[written ? EMU_C_UNIQUE_STORE_SECTORS : EMU_C_UNIQUE_LOAD_SECTORS] += fresh;
}

uint8_t *emu_global(emu_warp *w, uint64_t address, uint64_t bytes, uint32_t access) {
    emu_machine *m = w->machine;
    if (address & EMU_GENERIC_SHARED) {
        emu_finding(w, EMU_F_BOUNDS, "a global access to a shared address 0x%llx", (unsigned long long)address);
        return NULL;
    }
    emu_region *r = emu_find_region(m, address, bytes);
    if (!r) {
        const emu_region *close = NULL;
        uint64_t best = 1ull << 20;
        for (uint32_t i = 0; i < m->region_count; i++) {
            const emu_region *c = &m->regions[i];
            uint64_t far = address >= c->lo ? (address >= c->hi ? address - c->hi : 0) : c->lo - address;
            if (far < best) best = far, close = c;
        }
        if (close)
            emu_finding(w, EMU_F_BOUNDS, "%s %llu bytes at %s %+lld, which has %llu bytes", access & EMU_WRITE ? "writes" : "reads",
                        (unsigned long long)bytes, emu_region_name(m, close->name), (long long)(address - close->lo),
                        (unsigned long long)(close->hi - close->lo));
        else
            emu_finding(w, EMU_F_BOUNDS, "%s %llu bytes at 0x%llx, which is no tensor's", access & EMU_WRITE ? "writes" : "reads",
                        (unsigned long long)bytes, (unsigned long long)address);
        return NULL;
    }
    if ((access & EMU_WRITE) && (r->flags & REGION_READ_ONLY)) {
        emu_finding(w, EMU_F_BOUNDS, "writes %s, which is read-only", emu_region_name(m, r->name));
        return NULL;
    }
    if (r->written) {
        uint8_t *at = r->written + (address - r->lo);
        if ((access & EMU_READ) && !(access & EMU_NOINIT) && CHECK(m, EMU_F_UNINIT)) {
            const uint8_t *hole = memchr(at, 0, bytes);
            if (hole) {
                emu_finding(w, EMU_F_UNINIT, "reads %s +%llu, which nothing has written", emu_region_name(m, r->name),
                            (unsigned long long)(hole - r->written));
                memset(at, 1, bytes);
            }
        }
        if (access & EMU_WRITE) memset(at, 1, bytes);
    }
    count_traffic(w, r, address, bytes, access);
    check_dependency(w, r, address, bytes, access);
    emu_shadow_global(w, r, address, bytes, access);
    emu_delay_touch(w, (uint8_t *)(uintptr_t)address, bytes);
    return (uint8_t *)(uintptr_t)address;
}

emu_cta *emu_cluster_cta(emu_warp *w, uint32_t rank) {
    emu_cluster *c = w->cta->cluster;
    if (rank < c->size) return c->ctas[rank];
    emu_finding(w, EMU_F_BOUNDS, "a shared address names CTA rank %u of a cluster of %u", rank, c->size);
    return NULL;
}

uint8_t *emu_shared(emu_warp *w, uint32_t address, uint32_t bytes, uint32_t access) {
    emu_cta *cta = w->cta;
    uint32_t rank = address >> EMU_SHARED_RANK_SHIFT, offset = address & ((1u << EMU_SHARED_RANK_SHIFT) - 1);
    if (rank != cta->rank && !(cta = emu_cluster_cta(w, rank))) return NULL;
    if (offset < EMU_SHARED_BASE || offset + bytes > cta->shared_end) {
        emu_finding(w, EMU_F_BOUNDS, "%s %u bytes at shared %+d, of which there are %u bytes", access & EMU_WRITE ? "writes" : "reads",
                    bytes, (int)(offset - EMU_SHARED_BASE), cta->shared_end - EMU_SHARED_BASE);
        return NULL;
    }
    if (cta != w->cta && !cta->live_warps) {
        emu_finding(w, EMU_F_BOUNDS, "touches shared memory of CTA rank %u, which has ended", rank);
        return NULL;
    }
    uint8_t *written = cta->written + (offset - EMU_SHARED_BASE);
    if ((access & EMU_READ) && !(access & EMU_NOINIT) && CHECK(w->machine, EMU_F_UNINIT)) {
        const uint8_t *hole = memchr(written, 0, bytes);
        if (hole) {
            emu_finding(w, EMU_F_UNINIT, "reads shared +%u, which nothing has written", (uint32_t)(hole - cta->written));
            memset(written, 1, bytes);
        }
    }
    if (access & EMU_WRITE) memset(written, 1, bytes);
    emu_shadow_shared(w, cta, offset, bytes, access);
    emu_delay_touch(w, cta->shared + offset, bytes);
    return cta->shared + offset;
}

int emu_settled(emu_warp *w, uint32_t address, uint32_t bytes, uint32_t access) {
    uint32_t rank = address >> EMU_SHARED_RANK_SHIFT, offset = address & ((1u << EMU_SHARED_RANK_SHIFT) - 1);
    emu_cta *cta = rank == w->cta->rank ? w->cta : rank < w->cta->cluster->size ? w->cta->cluster->ctas[rank] : NULL;
    if (!cta || offset < EMU_SHARED_BASE || offset + bytes > cta->shared_end) return 1; /* emu_shared reports it */
    if (!(access & EMU_NOINIT) && CHECK(w->machine, EMU_F_UNINIT) && memchr(cta->written + (offset - EMU_SHARED_BASE), 0, bytes)) return 0;
    if (!CHECK(w->machine, EMU_F_RACE) || !cta->cells) return 1;
    uint32_t at = offset - EMU_SHARED_BASE, async = access & EMU_ASYNC;
    uint32_t clock = async ? w->twin_clock[w->twin] : w->run->clock, agent = async ? w->run->twin : w->run->agent;
    for (uint32_t cell = at / 4; cell * 4 < at + bytes; cell++) {
        const emu_cell *c = &cta->cells[cell];
        if (!c->write_tag || (TAG_AGENT(c->write_tag) == agent && c->write_clock == clock)) continue;
        if (ordered(w, c->write_tag, c->write_clock, EMU_READ | async, 1, 1) != 1) return 0;
    }
    return 1;
}

const uint8_t *emu_generic_read(emu_warp *w, uint64_t address, uint32_t bytes) {
    uint64_t params = (uint64_t)(uintptr_t)w->params;
    if (address >= params && address + bytes <= params + w->cta->grid->param_bytes) return (const uint8_t *)(uintptr_t)address;
    if (address & EMU_GENERIC_SHARED) return emu_shared(w, (uint32_t)address, bytes, EMU_READ);
    return emu_global(w, address, bytes, EMU_READ);
}

int emu_aligned(emu_warp *w, uint64_t address, uint32_t alignment, const char *what) {
    if (!(address & (alignment - 1))) return 1;
    emu_finding(w, EMU_F_ALIGN, "%s at 0x%llx is not aligned to %u bytes", what, (unsigned long long)address, alignment);
    return 0;
}

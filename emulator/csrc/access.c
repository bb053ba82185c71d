/* Memory instructions: a warp's lanes at once, each lane checked. */
#include "internal.h"
#include "kernel.h"

static uint32_t flags_of(const emu_access *a) {
    return a->sem == SEM_WEAK ? 0 : EMU_ATOMIC;
}

static void count_global(emu_warp *w, uint32_t mask, const uint64_t *address, int64_t offset, uint32_t bytes, int store) {
    uint64_t *c = w->cta->grid->counters, sectors[EMU_LANES * 2];
    uint32_t n = 0;
    for (uint32_t i = 0; i < EMU_LANES; i++) {
        if (!(mask >> i & 1)) continue;
        uint64_t first = (address[i] + offset) >> 5, last = (address[i] + offset + bytes - 1) >> 5;
        for (uint64_t s = first; s <= last && s <= first + 1; s++) {
            uint32_t k = n;
            while (k && sectors[k - 1] != s) k--;
            if (!k) sectors[n++] = s;
        }
    }
    c[store ? EMU_C_STORE_BYTES : EMU_C_LOAD_BYTES] += (uint64_t)bytes * __builtin_popcount(mask);
    c[store ? EMU_C_STORE_SECTORS : EMU_C_LOAD_SECTORS] += n;
}

/* Wavefronts: the accesses of a phase (as many lanes as make 128 bytes) to different words of one bank take turns. */
static void count_shared(emu_warp *w, uint32_t mask, const uint64_t *address, int64_t offset, uint32_t bytes) {
    uint32_t per = bytes <= 4 ? 32 : 128 / bytes, waves = 0;
    if (!per) per = 1;
    for (uint32_t first = 0; first < EMU_LANES; first += per) {
        uint32_t words[32 * 8], n = 0, depth[32] = {0}, most = 0;
        for (uint32_t i = first; i < first + per; i++) {
            if (!(mask >> i & 1)) continue;
            for (uint32_t b = 0; b < bytes || !b; b += 4) {
                uint32_t word = (uint32_t)(address[i] + offset + b) >> 2, k = n;
                while (k && words[k - 1] != word) k--;
                if (k || n == 256) continue;
                words[n++] = word;
                if (++depth[word & 31] > most) most = depth[word & 31];
            }
        }
        waves += most;
    }
    w->cta->grid->counters[EMU_C_SHARED_WAVES] += waves;
    w->cta->grid->counters[EMU_C_SHARED_ACCESSES] += (__builtin_popcount(mask) + per - 1) / per;
}

/* Where one lane's bytes are; NULL after a finding. */
static uint8_t *place(emu_warp *w, const emu_access *a, uint64_t address, uint32_t bytes, uint32_t access, uint64_t *key) {
    int shared = a->space == SPACE_SHARED || (a->space == SPACE_GENERIC && (address & EMU_GENERIC_SHARED));
    if (!emu_aligned(w, address, bytes, access & EMU_WRITE ? "store" : "load")) return NULL;
    if (shared) {
        *key = (uint64_t)(uintptr_t)w->cta->cluster ^ (uint32_t)address;
        return emu_shared(w, (uint32_t)address, bytes, access);
    }
    *key = address;
    uint64_t params = (uint64_t)(uintptr_t)w->params;
    if (a->space == SPACE_GENERIC && !(access & EMU_WRITE) && address >= params &&
        address + bytes <= params + w->cta->grid->param_bytes)
        return (uint8_t *)(uintptr_t)address;
    return emu_global(w, address, bytes, access);
}

/* Strong operations order: what a load acquires, what a store releases. */
static void order_load(emu_warp *w, const emu_access *a, uint64_t key) {
    emu_sync *s = emu_sync_at(w->machine, key, 0);
    emu_run *r = w->run;
    if (!s) return;
    if (a->sem == SEM_ACQUIRE || a->sem == SEM_ACQ_REL) {
        emu_acquire_from(w, s, &r->now, a->scope == SCOPE_CTA);
        return;
    }
    if (!r->acquire.local) emu_clock_new(&r->acquire, w->cta->cluster->agents);
    emu_acquire_from(w, s, &r->acquire, a->scope == SCOPE_CTA);
    r->has_acquire = 1;
}

static void order_store(emu_warp *w, const emu_access *a, uint64_t key) {
    emu_run *r = w->run;
    if (a->sem == SEM_RELEASE || a->sem == SEM_ACQ_REL) {
        emu_delay_release(w, a->scope == SCOPE_CTA);
        emu_release_to(w, emu_sync_at(w->machine, key, 1), &r->now, a->scope == SCOPE_CTA);
    }
    else if (r->has_release)
        emu_release_to(w, emu_sync_at(w->machine, key, 1), &r->release, a->scope == SCOPE_CTA);
}

static uint64_t fetch(const uint8_t *from, uint32_t bytes, uint32_t extend) {
    uint64_t v = 0;
    memcpy(&v, from, bytes);
    switch (extend) {
    case EXTEND_S8: return (uint64_t)(int64_t)(int8_t)v;
    case EXTEND_S16: return (uint64_t)(int64_t)(int16_t)v;
    case EXTEND_S32: return (uint64_t)(int64_t)(int32_t)v;
    default: return v;
    }
}

static void put(const emu_access *a, void *const *out, uint32_t k, uint32_t lane, uint64_t v) {
    if (!out[k]) return; /* a sink */
    if (a->wide >> k & 1) ((uint64_t *)out[k])[lane] = v;
    else ((uint32_t *)out[k])[lane] = (uint32_t)v;
}

void emu_load(emu_warp *w, uint32_t mask, const emu_access *a, const uint64_t *address, int64_t offset, void *const *out) {
    uint32_t bytes = a->bytes * a->count;
    uint32_t access = EMU_READ | flags_of(a);
    uint64_t at[EMU_LANES], key;
    if (!mask) return;
    memcpy(at, address, sizeof at); /* a destination may be the address register */
    if (a->space == SPACE_SHARED) count_shared(w, mask, at, offset, bytes);
    else count_global(w, mask, at, offset, bytes, 0);
    for (uint32_t i = 0; i < EMU_LANES; i++) {
        if (!(mask >> i & 1)) continue;
        w->lane = (int)i;
        const uint8_t *from = place(w, a, at[i] + offset, bytes, access, &key);
        for (uint32_t k = 0; k < a->count; k++) put(a, out, k, i, from ? fetch(from + k * a->bytes, a->bytes, a->extend) : 0);
        if (a->sem != SEM_WEAK) order_load(w, a, key);
    }
    w->lane = -1;
}

static uint64_t source(const emu_access *a, const void *const *in, uint32_t k, uint32_t lane) {
    return a->wide >> k & 1 ? ((const uint64_t *)in[k])[lane] : ((const uint32_t *)in[k])[lane];
}

void emu_store(emu_warp *w, uint32_t mask, const emu_access *a, const uint64_t *address, int64_t offset, const void *const *in) {
    uint32_t bytes = a->bytes * a->count;
    uint32_t access = EMU_WRITE | flags_of(a);
    uint64_t key, highest = 0;
    int plain = 1;
    if (!mask) return;
    uint32_t first = (uint32_t)__builtin_ctz(mask);
    if (a->space == SPACE_SHARED) count_shared(w, mask, address, offset, bytes);
    else count_global(w, mask, address, offset, bytes, 1);
    for (uint32_t i = 0; i < EMU_LANES; i++) {
        if (!(mask >> i & 1)) continue;
        w->lane = (int)i;
        uint8_t data[64];
        for (uint32_t k = 0; k < a->count; k++) {
            uint64_t v = source(a, in, k, i);
            memcpy(data + k * a->bytes, &v, a->bytes);
        }
        if (address[i] < highest || (highest && address[i] == highest)) plain = 0;
        highest = address[i] > highest ? address[i] : highest;
        uint32_t how = access;
        if (!plain && a->sem == SEM_WEAK) { /* lanes of one instruction that write one value to one place do not race */
            for (uint32_t j = 0; j < i; j++) {
                if (!(mask >> j & 1) || address[j] != address[i]) continue;
                uint32_t k = 0;
                while (k < a->count && source(a, in, k, j) == source(a, in, k, i)) k++;
                if (k == a->count) {
                    w->lane = (int)j;
                    break;
                }
            }
        }
        uint8_t *to = place(w, a, address[i] + offset, bytes, how, &key);
        uint32_t late = 0;
        for (uint32_t k = 0; to && w->machine->policy == 2 && k < a->count; k++)
            late |= (uint32_t)emu_delay(w, a, key, to + k * a->bytes, data + k * a->bytes, i == first && !k) << k;
        if (a->sem != SEM_WEAK && late != (1u << a->count) - 1) order_store(w, a, key);
        for (uint32_t k = 0, n = late ? a->bytes : bytes; to && k * n < bytes; k++) {
            if (late >> k & 1 || !memcmp(to + k * n, data + k * n, n)) continue;
            memcpy(to + k * n, data + k * n, n);
            w->machine->progress++;
        }
    }
    w->lane = -1;
}

void emu_load_param(emu_warp *w, uint32_t mask, uint32_t offset, uint32_t bytes, uint32_t count, uint32_t extend, uint32_t wide,
                    void *const *out) {
    emu_access a = {.bytes = (uint8_t)bytes, .count = (uint8_t)count, .extend = (uint8_t)extend, .wide = (uint8_t)wide};
    if (offset + bytes * count > w->cta->grid->param_bytes) {
        emu_finding(w, EMU_F_BOUNDS, "reads %u bytes at parameter byte %u of %u", bytes * count, offset,
                    w->cta->grid->param_bytes);
        return;
    }
    if (!emu_aligned(w, offset, bytes * count, "parameter load")) return;
    for (uint32_t k = 0; k < count; k++) {
        uint64_t v = fetch(w->params + offset + k * bytes, bytes, extend);
        for (uint32_t i = 0; i < EMU_LANES; i++)
            if (mask >> i & 1) put(&a, out, k, i, v);
    }
}

static float as_float(uint32_t u) {
    float f;
    memcpy(&f, &u, 4);
    return f;
}
static uint32_t as_bits(float f) {
    uint32_t u;
    memcpy(&u, &f, 4);
    return u;
}

static uint64_t combine(uint32_t op, uint64_t old, uint64_t b, uint64_t c, uint32_t bytes) {
    int wide = bytes == 8;
    int64_t so = wide ? (int64_t)old : (int32_t)old, sb = wide ? (int64_t)b : (int32_t)b;
    switch (op) {
    case ATOM_ADD: return old + b;
    case ATOM_MIN_U: return old < b ? old : b;
    case ATOM_MAX_U: return old > b ? old : b;
    case ATOM_MIN_S: return so < sb ? old : b;
    case ATOM_MAX_S: return so > sb ? old : b;
    case ATOM_AND: return old & b;
    case ATOM_OR: return old | b;
    case ATOM_XOR: return old ^ b;
    case ATOM_EXCH: return b;
    case ATOM_CAS: return old == b ? c : old;
    case ATOM_INC: return old >= b ? 0 : old + 1;
    case ATOM_DEC: return old == 0 || old > b ? b : old - 1;
    case ATOM_ADD_F32: return as_bits(as_float((uint32_t)old) + as_float((uint32_t)b));
    default: {
        double x, y;
        memcpy(&x, &old, 8);
        memcpy(&y, &b, 8);
        x += y;
        memcpy(&old, &x, 8);
        return old;
    }
    }
}

void emu_atomic(emu_warp *w, uint32_t mask, const emu_access *a, uint32_t op, const uint64_t *address, int64_t offset,
                const void *b, const void *c, void *out) {
    uint64_t key;
    uint64_t ones = a->bytes == 8 ? ~0ull : (1ull << (8 * a->bytes)) - 1;
    const void *in[2] = {b, c};
    emu_access both = *a;
    both.wide = a->wide ? 3 : 0;
    if (op > ATOM_ADD_F32 && op != ATOM_ADD_F64) {
        emu_fatal(w, "packed 16-bit atomics are not emulated");
        return;
    }
    if (a->space != SPACE_SHARED) count_global(w, mask, address, offset, a->bytes, 1);
    for (uint32_t i = 0; i < EMU_LANES; i++) {
        if (!(mask >> i & 1)) continue;
        w->lane = (int)i;
        uint8_t *at = place(w, a, address[i] + offset, a->bytes, EMU_READ | EMU_WRITE | EMU_ATOMIC, &key);
        uint64_t old = at ? fetch(at, a->bytes, EXTEND_ZERO) : 0;
        order_load(w, a, key);
        order_store(w, a, key);
        uint64_t new = combine(op, old, source(&both, in, 0, i) & ones, c ? source(&both, in, 1, i) & ones : 0, a->bytes) & ones;
        if (at && new != old) {
            memcpy(at, &new, a->bytes);
            w->machine->progress++;
        }
        if (out) put(&both, &out, 0, i, old);
    }
    w->lane = -1;
}

void emu_cp_async(emu_warp *w, uint32_t mask, const uint32_t *to, int64_t to_offset, const uint64_t *from, int64_t from_offset,
                  uint32_t bytes, const uint32_t *source_bytes) {
    if (!mask) return;
    emu_async_begin(w, EMU_TWIN_CP_ASYNC);
    emu_async_join(w, EMU_Q_CP_ASYNC);
    count_global(w, mask, from, from_offset, bytes, 0);
    for (uint32_t i = 0; i < EMU_LANES; i++) {
        if (!(mask >> i & 1)) continue;
        w->lane = (int)i;
        uint32_t n = source_bytes ? source_bytes[i] : bytes, at = to[i] + (uint32_t)to_offset;
        uint64_t source_at = from[i] + from_offset;
        uint8_t data[16] = {0};
        if (n > bytes) {
            emu_finding(w, EMU_F_OPERAND, "cp.async of %u bytes with a source size of %u", bytes, n);
            n = bytes;
        }
        if (!emu_aligned(w, at, bytes, "cp.async destination") || !emu_aligned(w, source_at, bytes, "cp.async source")) continue;
        if (n) {
            const uint8_t *f = emu_global(w, source_at, n, EMU_READ | EMU_BY_TWIN);
            if (f) memcpy(data, f, n);
        }
        uint8_t *t = emu_shared(w, at, bytes, EMU_WRITE | EMU_BY_TWIN);
        if (t) memcpy(t, data, bytes);
    }
    w->lane = -1;
}

void emu_st_async(emu_warp *w, uint32_t mask, const uint32_t *to, int64_t offset, const uint32_t *mbar, int64_t mbar_offset,
                  uint32_t bytes, uint32_t count, uint32_t wide, const void *const *in) {
    emu_access a = {.bytes = (uint8_t)bytes, .count = (uint8_t)count, .wide = (uint8_t)wide};
    for (uint32_t i = 0; i < EMU_LANES; i++) {
        if (!(mask >> i & 1)) continue;
        w->lane = (int)i;
        uint32_t at = to[i] + (uint32_t)offset, bar = mbar[i] + (uint32_t)mbar_offset;
        if ((at ^ bar) >> EMU_SHARED_RANK_SHIFT)
            emu_finding(w, EMU_F_OPERAND, "st.async whose data and mbarrier are in different CTAs");
        emu_async_begin(w, EMU_TWIN_MBAR(bar));
        if (!emu_aligned(w, at, bytes * count, "st.async")) continue;
        uint8_t *t = emu_shared(w, at, bytes * count, EMU_WRITE | EMU_BY_TWIN);
        for (uint32_t k = 0; t && k < count; k++) {
            uint64_t v = source(&a, in, k, i);
            memcpy(t + k * bytes, &v, bytes);
        }
        emu_mbar_complete_tx(w, bar, bytes * count);
    }
    w->lane = -1;
}

void emu_try_cancel(emu_warp *w, uint32_t mask, const uint32_t *to, int64_t offset, const uint32_t *mbar, int64_t mbar_offset,
                    uint32_t all) {
    if (!mask) return;
    uint32_t i = (uint32_t)__builtin_ctz(mask), own = w->cta->rank;
    w->lane = (int)i;
    for (uint32_t rank = 0; rank < w->cta->cluster->size; rank++) {
        if (!all && rank != own) continue;
        uint32_t at = emu_map_rank(w, to[i] + (uint32_t)offset, rank), bar = emu_map_rank(w, mbar[i] + (uint32_t)mbar_offset, rank);
        emu_async_begin(w, EMU_TWIN_MBAR(bar));
        if (!emu_aligned(w, at, 16, "try_cancel")) continue;
        uint8_t *t = emu_shared(w, at, 16, EMU_WRITE | EMU_ASYNC);
        if (t) memset(t, 0, 16); /* bit 0: cancelled */
        emu_mbar_complete_tx(w, bar, 16);
    }
    w->lane = -1;
}

void emu_prefetch(emu_warp *w, uint32_t mask, const uint64_t *address, int64_t offset) {
    (void)w; (void)mask; (void)address; (void)offset; /* no effect that a program could see, not even a fault */
}

uint32_t emu_map_rank(emu_warp *w, uint32_t address, uint32_t rank) {
    (void)w; /* a rank that the cluster has not is wrong only where the address is used */
    return (address & ((1u << EMU_SHARED_RANK_SHIFT) - 1)) | rank << EMU_SHARED_RANK_SHIFT;
}

/* Instructions of one warp: shuffles, votes, reductions, special registers. The lanes that take part are converged. */
#include "internal.h"
#include "kernel.h"
#include <math.h>

enum { SHUFFLE_IDX, SHUFFLE_UP, SHUFFLE_DOWN, SHUFFLE_BFLY };

static int lane_of(emu_warp *w, uint32_t kind, uint32_t i, uint32_t b, uint32_t c, int *inside) {
    int clamp = c & 31, segment = c >> 8 & 31, max = ((int)i & segment) | (clamp & ~segment), min = (int)i & segment, j;
    (void)w;
    b &= 31;
    switch (kind) {
    case SHUFFLE_UP: j = (int)i - (int)b; *inside = j >= max; break;
    case SHUFFLE_DOWN: j = (int)(i + b); *inside = j <= max; break;
    case SHUFFLE_BFLY: j = (int)(i ^ b); *inside = j <= max; break;
    default: j = min | ((int)b & ~segment); *inside = j <= max; break;
    }
    return *inside ? j : (int)i;
}

void emu_shuffle(emu_warp *w, uint32_t mask, uint32_t kind, uint32_t *out, uint32_t *valid, const uint32_t *in, const uint32_t *b,
                 const uint32_t *c) {
    uint32_t from[EMU_LANES];
    memcpy(from, in, sizeof from);
    uint32_t bs[EMU_LANES], cs[EMU_LANES];
    memcpy(bs, b, sizeof bs);
    memcpy(cs, c, sizeof cs);
    for (uint32_t i = 0; i < EMU_LANES; i++) {
        if (!(mask >> i & 1)) continue;
        int inside, j = lane_of(w, kind, i, bs[i], cs[i], &inside);
        if (!(mask >> j & 1)) {
            w->lane = (int)i;
            emu_finding(w, EMU_F_BARRIER, "shfl reads lane %d, which takes no part (lanes 0x%08x do)", j, mask);
            w->lane = -1;
        }
        if (out) out[i] = from[j];
        if (valid) valid[i] = inside ? ~0u : 0;
    }
}

void emu_elect(emu_warp *w, uint32_t mask, const uint32_t *members, uint32_t *leader, uint32_t *elected) {
    uint32_t first = (uint32_t)__builtin_ctz(mask ? mask : 1), chosen;
    uint32_t among = members[first] & mask;
    chosen = among ? (uint32_t)__builtin_ctz(among) : first;
    (void)w;
    for (uint32_t i = 0; i < EMU_LANES; i++) {
        if (!(mask >> i & 1)) continue;
        if (leader) leader[i] = chosen;
        if (elected) elected[i] = i == chosen ? ~0u : 0;
    }
}

void emu_vote(emu_warp *w, uint32_t mask, uint32_t kind, uint32_t *out, const uint32_t *in, uint32_t negate) {
    uint32_t bits = (emu_bits(in) ^ (negate ? ~0u : 0)) & mask, v = 0;
    (void)w;
    switch (kind) {
    case VOTE_ALL: v = bits == mask ? ~0u : 0; break;
    case VOTE_ANY: v = bits ? ~0u : 0; break;
    case VOTE_UNI: v = bits == mask || !bits ? ~0u : 0; break;
    default: v = bits; break;
    }
    for (uint32_t i = 0; i < EMU_LANES; i++)
        if (mask >> i & 1) out[i] = v;
}

static float f(uint32_t u) {
    float x;
    memcpy(&x, &u, 4);
    return x;
}

static uint32_t reduce(uint32_t kind, uint32_t a, uint32_t b) {
    switch (kind) {
    case REDUX_ADD: return a + b;
    case REDUX_MIN_S: return (int32_t)a < (int32_t)b ? a : b;
    case REDUX_MAX_S: return (int32_t)a > (int32_t)b ? a : b;
    case REDUX_MIN_U: return a < b ? a : b;
    case REDUX_MAX_U: return a > b ? a : b;
    case REDUX_AND: return a & b;
    case REDUX_OR: return a | b;
    case REDUX_XOR: return a ^ b;
    default: {
        int nan = kind == REDUX_MIN_F_NAN || kind == REDUX_MAX_F_NAN, max = kind == REDUX_MAX_F || kind == REDUX_MAX_F_NAN;
        if (isnan(f(a)) && isnan(f(b))) return 0x7fffffff;
        if (isnan(f(a))) return nan ? 0x7fffffff : b;
        if (isnan(f(b))) return nan ? 0x7fffffff : a;
        if (f(a) == f(b)) return max ? a & b : a | b; /* of +0 and -0 */
        return (f(a) > f(b)) == max ? a : b;
    }
    }
}

void emu_redux(emu_warp *w, uint32_t mask, uint32_t kind, uint32_t *out, const uint32_t *in) {
    uint32_t v = 0, any = 0;
    (void)w;
    for (uint32_t i = 0; i < EMU_LANES; i++) {
        if (!(mask >> i & 1)) continue;
        v = any++ ? reduce(kind, v, in[i]) : in[i];
    }
    for (uint32_t i = 0; i < EMU_LANES; i++)
        if (mask >> i & 1) out[i] = v;
}

void emu_match_any(emu_warp *w, uint32_t mask, uint32_t *out, const uint32_t *in) {
    uint32_t from[EMU_LANES];
    (void)w;
    memcpy(from, in, sizeof from);
    for (uint32_t i = 0; i < EMU_LANES; i++) {
        if (!(mask >> i & 1)) continue;
        out[i] = 0;
        for (uint32_t j = 0; j < EMU_LANES; j++)
            if (mask >> j & 1 && from[j] == from[i]) out[i] |= 1u << j;
    }
}

void emu_special(emu_warp *w, uint32_t which, uint32_t *out) {
    emu_cta *cta = w->cta;
    emu_cluster *c = cta->cluster;
    emu_grid *g = cta->grid;
    uint32_t d = which & 3, v = 0;
    switch (which >> 2) {
    case SPECIAL_TID:
        for (uint32_t i = 0; i < EMU_LANES; i++) {
            uint32_t t = w->index * 32 + i;
            out[i] = d == 0 ? t % g->block[0] : d == 1 ? t / g->block[0] % g->block[1] : t / (g->block[0] * g->block[1]);
        }
        return;
    case SPECIAL_LANE:
        for (uint32_t i = 0; i < EMU_LANES; i++) out[i] = i;
        return;
    case SPECIAL_LANEMASK:
        for (uint32_t i = 0; i < EMU_LANES; i++) {
            uint32_t eq = 1u << i;
            out[i] = d == 0 ? eq : d == 1 ? eq - 1 : d == 2 ? (eq - 1) | eq : ~((eq - 1) | eq);
        }
        return;
    case SPECIAL_LANEMASK_GE:
        for (uint32_t i = 0; i < EMU_LANES; i++) out[i] = ~((1u << i) - 1);
        return;
    case SPECIAL_NTID: v = g->block[d]; break;
    case SPECIAL_CTAID: v = cta->id[d]; break;
    case SPECIAL_NCTAID: v = g->dims[d]; break;
    case SPECIAL_CLUSTERID: v = c->id[d]; break;
    case SPECIAL_NCLUSTERID: v = g->dims[d] / g->cluster_dims[d]; break;
    case SPECIAL_CLUSTER_CTAID: v = cta->id[d] % g->cluster_dims[d]; break;
    case SPECIAL_CLUSTER_NCTAID: v = g->cluster_dims[d]; break;
    case SPECIAL_CLUSTER_CTARANK: v = cta->rank; break;
    case SPECIAL_CLUSTER_NCTARANK: v = c->size; break;
    case SPECIAL_IS_EXPLICIT: v = g->cluster_dims[3 - 1] && c->size > 1 ? ~0u : 0; break;
    case SPECIAL_WARP: v = w->index; break;
    case SPECIAL_NWARP: v = cta->warp_count; break;
    case SPECIAL_SM: v = cta->sm; break;
    case SPECIAL_NSM: v = w->machine->sms; break;
    case SPECIAL_DYNAMIC_SMEM: v = g->dynamic_bytes; break;
    case SPECIAL_TOTAL_SMEM: v = g->shared_bytes; break;
    case SPECIAL_CLOCK: v = (uint32_t)emu_time(w); break;
    default: break;
    }
    for (uint32_t i = 0; i < EMU_LANES; i++) out[i] = v;
}

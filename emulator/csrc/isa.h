/* Scalar meanings of arithmetic instructions, one lane at a time; translated kernels loop over them. Registers narrower than 32
 * bits are zero-extended. Approximate instructions are computed in double and rounded once, which is inside every bound of the
 * ISA. */
#ifndef EMU_ISA_H
#define EMU_ISA_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "tensor/numbers.h"

static inline float F(uint32_t u) { float f; memcpy(&f, &u, 4); return f; }
static inline uint32_t U(float f) { uint32_t u; memcpy(&u, &f, 4); return u; }
static inline double DF(uint64_t u) { double f; memcpy(&f, &u, 8); return f; }
static inline uint64_t DU(double f) { uint64_t u; memcpy(&u, &f, 8); return u; }

/* A NaN result is the canonical one. */
static inline uint32_t N(float f) { uint32_t u = U(f); return (u & 0x7fffffffu) > 0x7f800000u ? 0x7fffffffu : u; }
static inline float Z(float f) { uint32_t u = U(f); return F((u & 0x7f800000u) ? u : u & 0x80000000u); } /* ftz */
static inline uint32_t isa_sat(float f) { return f > 0.0f ? (f < 1.0f ? U(f) : 0x3f800000u) : 0u; }

static inline uint32_t isa_lo(uint64_t x) { return (uint32_t)x; }
static inline uint32_t isa_hi(uint64_t x) { return (uint32_t)(x >> 32); }
static inline uint64_t isa_pair(uint32_t lo, uint32_t hi) { return (uint64_t)hi << 32 | lo; }

static inline uint32_t isa_shl32(uint32_t a, uint32_t n) { return n > 31 ? 0 : a << n; }
static inline uint64_t isa_shl64(uint64_t a, uint32_t n) { return n > 63 ? 0 : a << n; }
static inline uint32_t isa_shru32(uint32_t a, uint32_t n) { return n > 31 ? 0 : a >> n; }
static inline uint64_t isa_shru64(uint64_t a, uint32_t n) { return n > 63 ? 0 : a >> n; }
static inline uint32_t isa_shrs32(uint32_t a, uint32_t n) { return (uint32_t)((int32_t)a >> (n > 31 ? 31 : n)); }
static inline uint64_t isa_shrs64(uint64_t a, uint32_t n) { return (uint64_t)((int64_t)a >> (n > 63 ? 63 : n)); }
static inline uint32_t isa_shl16(uint32_t a, uint32_t n) { return n > 15 ? 0 : a << n & 0xffffu; }
static inline uint32_t isa_shru16(uint32_t a, uint32_t n) { return n > 15 ? 0 : (a & 0xffffu) >> n; }
static inline uint32_t isa_shrs16(uint32_t a, uint32_t n) { return (uint32_t)((int16_t)a >> (n > 15 ? 15 : n)) & 0xffffu; }

static inline uint32_t isa_divu32(uint32_t a, uint32_t b) { return b ? a / b : ~0u; }
static inline uint32_t isa_remu32(uint32_t a, uint32_t b) { return b ? a % b : a; }
static inline uint32_t isa_divs32(uint32_t a, uint32_t b) { return b ? (uint32_t)((int64_t)(int32_t)a / (int32_t)b) : ~0u; }
static inline uint32_t isa_rems32(uint32_t a, uint32_t b) { return b ? (uint32_t)((int64_t)(int32_t)a % (int32_t)b) : a; }
static inline uint64_t isa_divu64(uint64_t a, uint64_t b) { return b ? a / b : ~0ull; }
static inline uint64_t isa_remu64(uint64_t a, uint64_t b) { return b ? a % b : a; }
static inline uint64_t isa_divs64(uint64_t a, uint64_t b) {
    return !b ? ~0ull : b == ~0ull ? 0 - a : (uint64_t)((int64_t)a / (int64_t)b);
}
static inline uint64_t isa_rems64(uint64_t a, uint64_t b) { return !b ? a : b == ~0ull ? 0 : (uint64_t)((int64_t)a % (int64_t)b); }
static inline uint64_t isa_mulhiu64(uint64_t a, uint64_t b) { return (uint64_t)((unsigned __int128)a * b >> 64); }
static inline uint64_t isa_mulhis64(uint64_t a, uint64_t b) {
    return (uint64_t)((__int128)(int64_t)a * (int64_t)b >> 64);
}

static inline uint32_t isa_clz32(uint32_t a) { return a ? (uint32_t)__builtin_clz(a) : 32; }
static inline uint32_t isa_clz64(uint64_t a) { return a ? (uint32_t)__builtin_clzll(a) : 64; }
static inline uint32_t isa_bfindu32(uint32_t a) { return a ? 31u - (uint32_t)__builtin_clz(a) : ~0u; }
static inline uint32_t isa_bfinds32(uint32_t a) { return isa_bfindu32((int32_t)a < 0 ? ~a : a); }
static inline uint32_t isa_brev32(uint32_t a) {
    a = (a >> 1 & 0x55555555u) | (a & 0x55555555u) << 1;
    a = (a >> 2 & 0x33333333u) | (a & 0x33333333u) << 2;
    a = (a >> 4 & 0x0f0f0f0fu) | (a & 0x0f0f0f0fu) << 4;
    return __builtin_bswap32(a);
}
static inline uint32_t isa_bfeu32(uint32_t a, uint32_t pos, uint32_t len) {
    pos &= 255, len &= 255;
    uint64_t v = pos > 31 ? 0 : a >> pos;
    return (uint32_t)(len > 31 ? v : v & ((1ull << len) - 1));
}
static inline uint32_t isa_bfes32(uint32_t a, uint32_t pos, uint32_t len) {
    pos &= 255, len &= 255;
    if (!len) return 0;
    uint32_t msb = pos + len - 1 > 31 ? 31 : pos + len - 1, sign = a >> msb & 1, v = isa_bfeu32(a, pos, len);
    if (pos + len > 32) len = pos > 31 ? 0 : 32 - pos;
    return len > 31 ? v : sign ? v | ~((1u << len) - 1) : v;
}
static inline uint32_t isa_bfi32(uint32_t a, uint32_t b, uint32_t pos, uint32_t len) {
    pos &= 255, len &= 255;
    if (pos > 31 || !len) return b;
    uint32_t mask = (uint32_t)(len > 31 ? ~0u : (1u << len) - 1) << pos;
    return (b & ~mask) | (a << pos & mask);
}
static inline uint32_t isa_shf_l(uint32_t a, uint32_t b, uint32_t n, int clamp) {
    n = clamp ? (n > 32 ? 32 : n) : n & 31;
    return (uint32_t)((isa_pair(a, b) << n) >> 32);
}
static inline uint32_t isa_shf_r(uint32_t a, uint32_t b, uint32_t n, int clamp) {
    n = clamp ? (n > 32 ? 32 : n) : n & 31;
    return (uint32_t)(isa_pair(a, b) >> n);
}
static inline uint32_t isa_prmt(uint32_t a, uint32_t b, uint32_t selector) {
    uint64_t both = isa_pair(a, b);
    uint32_t out = 0;
    for (int i = 0; i < 4; i++) {
        uint32_t s = selector >> (4 * i) & 15, byte = (uint32_t)(both >> (8 * (s & 7))) & 255;
        if (s & 8) byte = byte & 128 ? 255 : 0;
        out |= byte << (8 * i);
    }
    return out;
}
static inline uint32_t isa_lop3(uint32_t a, uint32_t b, uint32_t c, uint32_t table) {
    uint32_t out = 0;
    for (int i = 0; i < 8; i++)
        if (table >> i & 1) out |= (i & 4 ? a : ~a) & (i & 2 ? b : ~b) & (i & 1 ? c : ~c);
    return out;
}

/* min and max: NaN loses, -0 < +0; the .NaN forms keep NaN. */
static inline uint32_t isa_max(float a, float b) {
    if (isnan(a)) return isnan(b) ? 0x7fffffffu : U(b);
    if (isnan(b)) return U(a);
    return a == b ? U(a) & U(b) : a > b ? U(a) : U(b);
}
static inline uint32_t isa_min(float a, float b) {
    if (isnan(a)) return isnan(b) ? 0x7fffffffu : U(b);
    if (isnan(b)) return U(a);
    return a == b ? U(a) | U(b) : a < b ? U(a) : U(b);
}
static inline uint32_t isa_max_nan(float a, float b) { return isnan(a) || isnan(b) ? 0x7fffffffu : isa_max(a, b); }
static inline uint32_t isa_min_nan(float a, float b) { return isnan(a) || isnan(b) ? 0x7fffffffu : isa_min(a, b); }

static inline float isa_ex2(float x) { return (float)exp2((double)x); }
static inline float isa_lg2(float x) { return (float)log2((double)x); }
static inline float isa_rcp(float x) { return (float)(1.0 / (double)x); }
static inline float isa_rsqrt(float x) { return (float)(1.0 / sqrt((double)x)); }
static inline float isa_sin(float x) { return (float)sin((double)x); }
static inline float isa_cos(float x) { return (float)cos((double)x); }
static inline float isa_tanh(float x) { return (float)tanh((double)x); }
static inline float isa_divf(float a, float b) { return (float)((double)a / (double)b); }

/* Conversions to integers saturate; NaN becomes 0. mode: 0 nearest even, 1 toward zero, 2 down, 3 up. */
static inline double isa_rint(double x, int mode) {
    return mode == 0 ? nearbyint(x) : mode == 1 ? trunc(x) : mode == 2 ? floor(x) : ceil(x);
}
static inline int64_t isa_to_s(double x, int mode, int bits) {
    if (isnan(x)) return 0;
    x = isa_rint(x, mode);
    double top = ldexp(1.0, bits - 1);
    if (x >= top) return bits == 64 ? INT64_MAX : (int64_t)(top - 1);
    if (x < -top) return bits == 64 ? INT64_MIN : -(int64_t)top;
    return (int64_t)x;
}
static inline uint64_t isa_to_u(double x, int mode, int bits) {
    if (isnan(x)) return 0;
    x = isa_rint(x, mode);
    double top = ldexp(1.0, bits);
    if (x >= top) return bits == 64 ? UINT64_MAX : (1ull << bits) - 1;
    return x < 0 ? 0 : (uint64_t)x;
}

/* A double sum rounded to odd, so that a second rounding to 16 bits is as if there had been one. */
static inline double isa_odd_sum(double p, double c) {
    double s = p + c, b = s - p, e = (p - (s - b)) + (c - b);
    uint64_t u = DU(s);
    if (e != 0 && !(u & 1) && !isnan(s) && !isinf(s)) u += (e > 0) == (s > 0) ? 1 : (uint64_t)-1;
    return DF(u);
}
static inline float isa_odd_float(double x) { /* double to float, to odd */
    float f = (float)x;
    uint32_t u = U(f);
    if ((double)f != x && !isnan(f) && !(u & 1)) {
        if (isinf(f)) return F(u - 1);
        u += (x > (double)f) == (f > 0 || (f == 0 && x > 0)) ? 1 : (uint32_t)-1;
        if (f == 0) u = x > 0 ? 1u : 0x80000001u;
    }
    return F(u);
}
static inline float isa_relu(float f) { return f > 0 || isnan(f) ? f : 0.0f; }
static inline uint32_t isa_f16(float f) { return emu_to_f16(f); }
static inline uint32_t isa_bf16(float f) {
    uint32_t u = U(f), r = (u + 0x7fffu + (u >> 16 & 1u)) >> 16;
    return (u & 0x7fffffffu) > 0x7f800000u ? 0x7fffu : r;
}
/* A double that is exact or rounded to odd, to float in a directed mode: 1 toward zero, 2 down, 3 up. */
static inline float isa_directed(double x, int mode) {
    float f = (float)x;
    if (isnan(f) || (double)f == x) return f;
    int down = mode == 2 || (mode == 1 && x > 0);
    if (down && (double)f > x) return nextafterf(f, -INFINITY);
    if (!down && (double)f < x) return nextafterf(f, INFINITY);
    return f;
}
static inline uint32_t isa_f16_rz(float f) {
    uint32_t r = emu_to_f16(f);
    float back = emu_from_f16((uint16_t)r);
    if ((r & 0x7fff) == 0x7c00 && !isinf(f)) return (r & 0x8000) | 0x7bff;
    return fabsf(back) > fabsf(f) ? r - 1 : r;
}
static inline uint32_t isa_bf16_rz(float f) { return isnan(f) ? 0x7fff : U(f) >> 16; }
static inline uint32_t isa_fma16(float a, float b, float c) { return isa_f16(isa_odd_float(isa_odd_sum((double)a * b, c))); }
static inline uint32_t isa_fmab16(float a, float b, float c) { return isa_bf16(isa_odd_float(isa_odd_sum((double)a * b, c))); }

#endif

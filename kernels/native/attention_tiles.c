/* The task of attention.c on matrix units, for bfloat16: the same computation over the same blocks of slots.

Sixteen keys, as they lie in memory, are the left operand and up to sixteen queries, packed once, the right one, and weights, rounded to
bfloat16 as in FlashAttention, the left one against pairs of values. Over finite keys and values a query's result does not depend on which other queries or rows
are in the call. */

#include <math.h>
#include <string.h>

#include "calls.h"
#include "tiles.h"
#include "vector.h"

#if TILES

#define TILE (W * W) /* 4-byte entries of a tile */

/* bytes of memory for a task of n queries, in lines of 64 */
int64_t tiles_need(int64_t n, int64_t size, int64_t value_size) {
    const int64_t some = (n + W - 1) / W;
    return 4 * (some * (size / 32 * TILE + W * value_size + 2 * W) + 4 * TILE + KC * W) + 2 * (W * KC + KC * value_size + W * size) +
           4 * KC + 64;
}

static inline vec choose(ivec where, vec a, vec b) { return (vec)(((ivec)a & where) | ((ivec)b & ~where)); }

/* pairs of rows a and b [32] of bfloat16: two lines of 16 */
static inline void pairs(__m512i a, __m512i b, uint16_t *low, uint16_t *high) {
    const __m512i first = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37, 5, 36, 4,
                                           35, 3, 34, 2, 33, 1, 32, 0);
    const __m512i second = _mm512_add_epi16(first, _mm512_set1_epi16(16));
    _mm512_store_si512(low, _mm512_permutex2var_epi16(a, first, b));
    if (high) _mm512_store_si512(high, _mm512_permutex2var_epi16(a, second, b));
}

/* which of the slots from `slot` on a query sees: its interval lo:hi, and its line of the row's mask, which begins at `from` */
static inline ivec sees(int64_t slot, int64_t lo, int64_t hi, const uint8_t *line, int64_t from, int64_t end) {
    const ivec here = LANES + (int32_t)slot;
    ivec seen = (here >= (int32_t)lo) & (here < (int32_t)hi);
    if (line && slot + W > from) {
        uint8_t bytes[W] = {0};
        const int64_t x = slot < from ? from - slot : 0, y = slot + W > end ? end - slot : W;
        memcpy(bytes + x, line + slot + x, y - x);
        seen |= __builtin_convertvector(*(const bvec *)bytes, ivec) != 0;
    }
    return seen;
}

static inline __attribute__((always_inline)) void task(const Plan *p, const Call *c, int64_t r, int64_t h, const int D, const int DV,
                                                       char *space) {
    const int64_t group = c->heads / c->kv_heads, t0 = p->starts[r], n = (p->starts[r + 1] - t0) * group, end = p->length[r];
    const int64_t all = (n + W - 1) / W, parts = D / 32;
    const float none = -INFINITY;
    uint32_t *asked = (uint32_t *)(((uintptr_t)space + 63) / 64 * 64);    /* [all][parts][pairs][queries] */
    float *acc = (float *)(asked + all * parts * TILE);                   /* [all * 16][DV] */
    float *most = acc + all * W * DV, *sum = most + all * W;              /* [all * 16] */
    float *score = sum + all * W, *made = score + KC * W;                 /* [16][KC], [4][16][16] */
    uint16_t *weight = (uint16_t *)(made + 4 * TILE);                     /* [16][KC] */
    uint16_t *value = weight + W * KC;                                    /* [KC / 32][DV / 16][16 pairs of slots][16] pairs */
    uint16_t *tail = value + KC * DV;                                     /* [16][D]: the last keys of the row */
    int32_t *live = (int32_t *)(tail + W * D);                            /* [KC] */
    const uint16_t *query = c->query, *keys = c->keys, *values = c->values;
    const uint8_t *mask = p->mask ? p->mask + p->mask_at[r] : NULL;
    const int64_t from = mask ? p->mask_from[r] : end, wide = end - from;
    int64_t low = end, high = 0;

    memset(asked, 0, all * parts * TILE * 4);
    memset(acc, 0, all * W * DV * 4);
    for (int64_t i = 0; i < all * W; i++) {
        most[i] = none;
        sum[i] = 0;
        if (i >= n) continue;
        const int64_t t = t0 + i / group, g = h * group + i % group;
        const uint16_t *q = query + t * c->q_token + g * c->q_head;
        for (int d = 0; d < D / 2; d++)
            memcpy(asked + (i / W * parts + d / W) * TILE + d % W * W + i % W, q + 2 * d, 4);
        if (p->low[t] < low) low = p->low[t];
        if (p->high[t] > high) high = p->high[t];
    }
    if (mask) {
        if (from < low) low = from;
        high = end;
    }
    if (high > end) high = end;
    for (int64_t s0 = low / KC * KC; s0 < high; s0 += KC) {
        const int64_t s1 = s0 + KC < high ? s0 + KC : high;
        const int64_t a = s0 > low ? 0 : (low - s0) / W * W, b = s1 - s0; /* slots a:b of this block */
        for (int64_t i0 = 0; i0 < all; i0++) {
            const int count = n - i0 * W < W ? (int)(n - i0 * W) : W;
            vec best[W];
            ivec odd[W]; /* scores that are not numbers */
            for (int i = 0; i < count; i++) {
                best[i] = splat(none);
                odd[i] = (ivec){0};
            }
            memset(weight + count * KC, 0, (W - count) * KC * 2);
            memset(live, 0, KC * 4);
            for (int64_t s = a; s < b; s += W) { /* scores */
                const int64_t slot = s0 + s;
                const uint16_t *k = keys + locate(p, r, slot, c->k_row, c->k_slot) + h * c->k_head;
                int64_t stride = c->k_slot;
                if (slot + W > end) { /* the row ends here: what lies behind is not read */
                    memset(tail, 0, W * D * 2);
                    for (int64_t j = 0; j < end - slot; j++) memcpy(tail + j * D, k + j * stride, D * 2);
                    k = tail;
                    stride = D;
                }
                _tile_zero(0);
                WRITTEN();
                for (int64_t part = 0; part < parts; part++) {
                    _tile_loadd(4, k + part * 32, stride * 2);
                    _tile_loadd(5, asked + (i0 * parts + part) * TILE, 64);
                    _tile_dpbf16ps(0, 4, 5);
                }
                _tile_stored(0, made, 64);
                for (int i = 0; i < count; i++) {
                    const int64_t x = i0 * W + i, t = t0 + x / group, lo = p->low[t], hi = p->high[t];
                    vec y = (vec)_mm512_i32gather_ps((__m512i)(LANES * W), made + i, 4) * c->scale;
                    if (c->softcap != 0) y = capped(y, c->softcap);
                    if (slot < lo || slot + W > hi) {
                        const uint8_t *line = mask ? mask + (h * group + x % group) * p->mask_head[r] + (t - t0) * wide - from : NULL;
                        y = choose(sees(slot, lo, hi, line, from, end), y, splat(none));
                    }
                    odd[i] |= y != y;
                    best[i] = choose(y > best[i], y, best[i]);
                    *(vec *)(score + i * KC + s) = y;
                }
            }
            float old[W]; /* what becomes of the sums so far */
            int some = 0;
            for (int i = 0; i < count; i++) {
                const int64_t x = i0 * W + i;
                int wrong = 0;
                for (int j = 0; j < W; j++) wrong |= odd[i][j];
                if (wrong) sum[x] = NAN; /* and so is everything that is made of it */
                float m = wrong ? none : top(best[i]);
                old[i] = 1;
                memset(weight + i * KC, 0, KC * 2);
                if (m == none) continue; /* sees nothing here */
                some = 1;
                m = m > most[x] ? m : most[x];
                vec more = {0};
                for (int64_t s = a; s < b; s += W) {
                    const vec e = exp_neg(*(vec *)(score + i * KC + s) - m);
                    more += e;
                    *(ivec *)(live + s) |= e != 0;
                    store(weight + i * KC, s, e, 1);
                }
                if (m != most[x]) {
                    old[i] = most[x] == none ? 0 : exp_neg(splat(most[x] - m))[0];
                    most[x] = m;
                }
                sum[x] = sum[x] * old[i] + total(more);
            }
            if (!some) continue; /* what was stays as it is */
            for (int s = 0; s < KC; s += 2) { /* values of slots without weight are not read */
                const int64_t slot = s0 + s;
                if (slot + KC + 1 < high) { /* read a block later */
                    const uint16_t *k = keys + locate(p, r, slot + KC, c->k_row, c->k_slot) + h * c->k_head;
                    const uint16_t *v = values + locate(p, r, slot + KC, c->v_row, c->v_slot) + h * c->v_head;
                    for (int d = 0; d < D; d += 32) {
                        __builtin_prefetch(k + d, 0, 2);
                        __builtin_prefetch(k + c->k_slot + d, 0, 2);
                    }
                    for (int d = 0; d < DV; d += 32) {
                        __builtin_prefetch(v + d, 0, 2);
                        __builtin_prefetch(v + c->v_slot + d, 0, 2);
                    }
                }
                uint16_t *into = value + s / 32 * DV * 32 + s % 32 / 2 * 32;
                const uint16_t *one = NULL, *two = NULL;
                if (live[s]) one = values + locate(p, r, slot, c->v_row, c->v_slot) + h * c->v_head;
                if (live[s + 1]) two = values + locate(p, r, slot + 1, c->v_row, c->v_slot) + h * c->v_head;
                const __m512i zero = _mm512_setzero_si512();
                for (int d = 0; d < DV; d += 32) {
                    const __m512i x = one ? _mm512_loadu_si512(one + d) : zero, y = two ? _mm512_loadu_si512(two + d) : zero;
                    pairs(x, y, into + d / 16 * 512, into + (d / 16 + 1) * 512);
                }
            }
            for (int d = 0; d < DV; d += 4 * W) {
                const int columns = DV - d < 4 * W ? (DV - d) / W : 4;
                _tile_zero(0);
                _tile_zero(1);
                _tile_zero(2);
                _tile_zero(3);
                WRITTEN();
                for (int s = 0; s < KC; s += 32) {
                    const uint16_t *v = value + s * DV + d / W * 512;
                    _tile_loadd(7, weight + s, KC * 2);
                    _tile_loadd(4, v, 64);
                    _tile_dpbf16ps(0, 7, 4);
                    if (columns > 1) {
                        _tile_loadd(5, v + 512, 64);
                        _tile_dpbf16ps(1, 7, 5);
                    }
                    if (columns > 2) {
                        _tile_loadd(6, v + 1024, 64);
                        _tile_dpbf16ps(2, 7, 6);
                    }
                    if (columns > 3) {
                        _tile_loadd(4, v + 1536, 64);
                        _tile_dpbf16ps(3, 7, 4);
                    }
                }
                _tile_stored(0, made, 64);
                _tile_stored(1, made + TILE, 64);
                _tile_stored(2, made + 2 * TILE, 64);
                _tile_stored(3, made + 3 * TILE, 64);
                for (int i = 0; i < count; i++)
                    for (int x = 0; x < columns; x++) {
                        vec *at = (vec *)(acc + (i0 * W + i) * DV + d + x * W);
                        *at = *at * old[i] + *(vec *)(made + x * TILE + i * W);
                    }
            }
        }
    }
    for (int64_t i = 0; i < n; i++) {
        const int64_t t = t0 + i / group, g = h * group + i % group, at = t * c->o_token + g * c->o_head;
        float all_of_it = sum[i], m = most[i], scale = 1;
        if (c->sinks) { /* one more logit, which takes weight and gives nothing */
            const float sink = c->sinks[g];
            float high = m > sink ? m : sink;
            if (high == none) high = 0;
            scale = m == none ? 0 : expf(m - high);
            all_of_it = all_of_it * scale + expf(sink - high);
            m = high;
        }
        float one = all_of_it > 0 ? scale / all_of_it : 0;
        if (all_of_it != all_of_it) one = all_of_it; /* what a query sees is not finite: neither is its output */
        for (int d = 0; d < DV; d += W) store(c->out, at + d, *(vec *)(acc + i * DV + d) * one, 1);
        if (c->lse) c->lse[t * c->heads + g] = all_of_it == 0 ? none : m + logf(all_of_it);
    }
}

/* Heads of 32 are not worth packing for the few queries of a step, and a query's bits must not depend on their number. */
int tiles_fit(const Call *c) { return c->half && c->size >= 64 && c->size % 32 == 0 && c->value_size % 32 == 0 && tiles(); }

/* One row and KV head; this thread's tiles are set up. */
void attend_tiles(const Plan *p, const Call *c, int64_t r, int64_t h, char *space) {
    if (c->size == 64 && c->value_size == 64) task(p, c, r, h, 64, 64, space);
    else if (c->size == 128 && c->value_size == 128) task(p, c, r, h, 128, 128, space);
    else task(p, c, r, h, (int)c->size, (int)c->value_size, space);
}

#endif

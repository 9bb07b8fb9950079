/* Attention of few queries over many slots, at the speed at which the slots can be read.

A task is one row and one KV head: its keys and values are read once for all queries and for all query heads that share them. Slots
are taken in blocks of KC, aligned to absolute slot numbers, with an online softmax over the blocks (Milakov & Gimelshein,
arXiv 1805.02867), so over finite keys and values the result of a query does not depend on which other queries or rows are in the
call. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "calls.h"
#include "tiles.h"
#include "vector.h"

#define QT 6  /* queries that share registers */

/* Asks memory for an entry that is read a block later, a slot at a time between the arithmetic: of itself a processor does not look that
   far ahead past so many instructions. */
static inline __attribute__((always_inline)) void soon(const void *from, int64_t at, int D, int half) {
    const int64_t bytes = half ? 2 : 4;
    for (int64_t b = 0; b < D * bytes; b += 64) __builtin_prefetch((const char *)from + at * bytes + b, 0, 2);
}

/* scores [QT][W] of QT queries against W keys, `stride` apart */
#define DOTS(NQ)                                                                                   \
    static inline __attribute__((always_inline)) void dots##NQ(                                    \
        const float *q, const void *k, int64_t at, int64_t stride, int64_t ahead, int D, int half, vec *scores) { \
        vec part[NQ][W];                                                                           \
        for (int j = 0; j < W; j++) {                                                              \
            soon(k, at + ahead + j * stride, D, half);                                             \
            vec acc[NQ];                                                                           \
            for (int i = 0; i < NQ; i++) acc[i] = (vec){0};                                        \
            for (int d = 0; d < D; d += W) {                                                       \
                vec x = load(k, at + j * stride + d, half);                                        \
                for (int i = 0; i < NQ; i++) acc[i] += x * *(const vec *)(q + i * D + d);          \
            }                                                                                      \
            for (int i = 0; i < NQ; i++) part[i][j] = acc[i];                                      \
        }                                                                                          \
        for (int i = 0; i < NQ; i++) scores[i] = sums(part[i]);                                    \
    }
DOTS(1)
DOTS(2)
DOTS(3)
DOTS(4)
DOTS(5)
DOTS(6)

/* acc [NQ][D] += weights [NQ][n slots] x values; slots that are not live, of no weight for any query, are not looked at */
#define MIX(NQ)                                                                                               \
    static inline __attribute__((always_inline)) void mix##NQ(float *acc, const float *p, const int32_t *live, \
                                                              const void *v, int64_t at, int64_t stride,     \
                                                              int64_t ahead, int n, int D, int half) {        \
        for (int d = 0; d < D; d += 4 * W) {                                                                  \
            int parts = D - d < 4 * W ? (D - d) / W : 4;                                                      \
            vec sum[NQ][4] = {{{0}}};                                                                                 \
            for (int i = 0; i < NQ; i++)                                                                      \
                for (int c = 0; c < 4; c++)                                                                   \
                    if (c < parts) sum[i][c] = *(vec *)(acc + i * D + d + c * W);                             \
            for (int s = 0; s < n; s++) {                                                                     \
                if (!live[s]) continue;                                                                       \
                if (!d) soon(v, at + ahead + s * stride, D, half);                                            \
                for (int c = 0; c < 4; c++)                                                                   \
                    if (c < parts) {                                                                          \
                        vec x = load(v, at + s * stride + d + c * W, half);                                   \
                        for (int i = 0; i < NQ; i++) sum[i][c] += x * p[i * KC + s];                    \
                    }                                                                                         \
            }                                                                                                 \
            for (int i = 0; i < NQ; i++)                                                                      \
                for (int c = 0; c < 4; c++)                                                                   \
                    if (c < parts) *(vec *)(acc + i * D + d + c * W) = sum[i][c];                             \
        }                                                                                                     \
    }
MIX(1)
MIX(2)
MIX(3)
MIX(4)
MIX(5)
MIX(6)

/* one row and KV head; D, DV and half are constants where this is inlined */
static inline __attribute__((always_inline)) void task(const Plan *p, const Call *c, int64_t r, int64_t h, int D,
                                                       int DV, int half, float *space) {
    const int64_t group = c->heads / c->kv_heads, t0 = p->starts[r], n = (p->starts[r + 1] - t0) * group;
    const int64_t end = p->length[r];
    const float none = -INFINITY;
    float *q = space, *acc = q + n * D, *m = acc + n * DV, *l = m + n, *w = l + n; /* w [QT][KC] */
    int64_t low = end, high = 0;
    const uint8_t *mask = p->mask ? p->mask + p->mask_at[r] : NULL;
    const int64_t from = mask ? p->mask_from[r] : end, wide = end - from;

    for (int64_t i = 0; i < n; i++) { /* query i * group + g: the heads of a query are neighbours */
        int64_t t = t0 + i / group, g = h * group + i % group, at = t * c->q_token + g * c->q_head;
        for (int d = 0; d < D; d += W) *(vec *)(q + i * D + d) = load(c->query, at + d, half) * c->scale;
        for (int d = 0; d < DV; d += W) *(vec *)(acc + i * DV + d) = (vec){0};
        m[i] = none;
        l[i] = 0;
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
        for (int64_t i0 = 0; i0 < n; i0 += QT) {
            const int nq = n - i0 < QT ? (int)(n - i0) : QT;
            vec best[QT];
            ivec odd[QT]; /* scores that are not numbers */
            for (int i = 0; i < QT; i++) {
                best[i] = splat(none);
                odd[i] = splat(0) != 0;
            }
            for (int64_t s = a; s < b; s += W) {
                const int64_t slot = s0 + s;
                const int64_t at = locate(p, r, slot, c->k_row, c->k_slot) + h * c->k_head;
                const int64_t ahead = i0 || slot + KC + W > high ? 0 : locate(p, r, slot + KC, c->k_row, c->k_slot) + h * c->k_head - at;
                ivec seen[QT];
                int some = 0, all = 1;
                for (int i = 0; i < nq; i++) {
                    const int64_t t = t0 + (i0 + i) / group;
                    const int64_t lo = p->low[t], hi = p->high[t];
                    if (slot >= lo && slot + W <= hi) {
                        seen[i] = splat(0) == 0;
                        some = 1;
                        continue;
                    }
                    all = 0;
                    const ivec here = LANES + (int32_t)slot;
                    seen[i] = (here >= (int32_t)lo) & (here < (int32_t)hi);
                    some |= slot < hi && slot + W > lo;
                    if (mask && slot + W > from) {
                        const uint8_t *line =
                            mask + (h * group + (i0 + i) % group) * p->mask_head[r] + (t - t0) * wide - from;
                        uint8_t bytes[W] = {0};
                        const int64_t x = slot < from ? from - slot : 0, y = slot + W > end ? end - slot : W;
                        memcpy(bytes + x, line + slot + x, y - x);
                        uint64_t two[2];
                        memcpy(two, bytes, W);
                        some |= (two[0] | two[1]) != 0;
                        seen[i] |= __builtin_convertvector(*(const bvec *)bytes, ivec) != 0;
                    }
                }
                if (!some) { /* for none of these queries: not read */
                    for (int i = 0; i < nq; i++) *(vec *)(w + i * KC + s) = splat(none);
                    continue;
                }
                vec score[QT];
                if (slot + W <= end) {
#define DOT(NQ) case NQ: dots##NQ(q + i0 * D, c->keys, at, c->k_slot, ahead, D, half, score); break;
                    switch (nq) { DOT(1) DOT(2) DOT(3) DOT(4) DOT(5) DOT(6) }
                } else { /* the row ends here: what lies behind is not read */
                    for (int i = 0; i < nq; i++) {
                        score[i] = splat(none);
                        for (int j = 0; j < end - slot; j++) {
                            vec x = (vec){0};
                            for (int d = 0; d < D; d += W)
                                x += load(c->keys, at + j * c->k_slot + d, half) * *(vec *)(q + (i0 + i) * D + d);
                            vec same[W]; /* summed in the order of a whole vector of slots */
                            for (int o = 0; o < W; o++) same[o] = x;
                            score[i][j] = sums(same)[0];
                        }
                    }
                }
                for (int i = 0; i < nq; i++) {
                    if (c->softcap != 0) score[i] = capped(score[i], c->softcap);
                    if (!all) score[i] = (vec)(((ivec)score[i] & seen[i]) | ((ivec)splat(none) & ~seen[i]));
                    odd[i] |= score[i] != score[i];
                    ivec more = score[i] > best[i];
                    best[i] = (vec)(((ivec)score[i] & more) | ((ivec)best[i] & ~more));
                    *(vec *)(w + i * KC + s) = score[i];
                }
            }
            for (int i = 0; i < nq; i++) {
                const int64_t x = i0 + i;
                int wrong = 0;
                for (int j = 0; j < W; j++) wrong |= odd[i][j];
                if (wrong) l[x] = NAN; /* and so is everything that is made of it */
                float most = wrong ? none : top(best[i]);
                if (most == none) { /* sees nothing here */
                    for (int64_t s = a; s < b; s += W) *(vec *)(w + i * KC + s) = (vec){0};
                    continue;
                }
                most = most > m[x] ? most : m[x];
                vec sum = {0};
                for (int64_t s = a; s < b; s += W) {
                    vec e = exp_neg(*(vec *)(w + i * KC + s) - most);
                    sum += e;
                    *(vec *)(w + i * KC + s) = e;
                }
                if (most != m[x]) {
                    float old = m[x] == none ? 0 : exp_neg(splat(m[x] - most))[0];
                    l[x] *= old;
                    for (int d = 0; d < DV; d += W) *(vec *)(acc + x * DV + d) *= old;
                    m[x] = most;
                }
                l[x] += total(sum);
            }
            for (int64_t s = a; s < b; s += W) {
                const int64_t slot = s0 + s;
                const int64_t at = locate(p, r, slot, c->v_row, c->v_slot) + h * c->v_head;
                const int64_t ahead = i0 || slot + KC + W > high ? 0 : locate(p, r, slot + KC, c->v_row, c->v_slot) + h * c->v_head - at;
                vec any = {0};
                for (int i = 0; i < nq; i++) any += *(vec *)(w + i * KC + s);
                int32_t live[W] __attribute__((aligned(4 * W)));
                *(ivec *)live = any != 0;
                const int some = b - s < W ? (int)(b - s) : W;
#define ADD(NQ) case NQ: mix##NQ(acc + i0 * DV, w + s, live, c->values, at, c->v_slot, ahead, some, DV, half); break;
                switch (nq) { ADD(1) ADD(2) ADD(3) ADD(4) ADD(5) ADD(6) }
            }
        }
    }
    for (int64_t i = 0; i < n; i++) {
        int64_t t = t0 + i / group, g = h * group + i % group, at = t * c->o_token + g * c->o_head;
        float sum = l[i];
        if (c->sinks) { /* one more logit, which takes weight and gives nothing */
            float sink = c->sinks[g], most = m[i] > sink ? m[i] : sink;
            if (most == none) most = 0;
            float old = m[i] == none ? 0 : expf(m[i] - most);
            for (int d = 0; d < DV; d += W) *(vec *)(acc + i * DV + d) *= old;
            sum = sum * old + expf(sink - most);
            m[i] = most;
        }
        float one = sum > 0 ? 1 / sum : 0;
        if (sum != sum) one = sum; /* what a query sees is not finite: neither is its output */
        for (int d = 0; d < DV; d += W) store(c->out, at + d, *(vec *)(acc + i * DV + d) * one, half);
        if (c->lse) c->lse[t * c->heads + g] = sum == 0 ? none : m[i] + logf(sum);
    }
}

static void run(const Plan *p, const Call *c, int64_t r, int64_t h, float *space) {
    const int64_t size = c->size == c->value_size ? c->size : 0;
#ifdef __AVX512F__ /* elsewhere compilers take minutes over them */
    if (size == 64 && !c->half) return task(p, c, r, h, 64, 64, 0, space);
    if (size == 128 && !c->half) return task(p, c, r, h, 128, 128, 0, space);
#endif
#if defined(__AVX512F__) && !TILES
    if (size == 64) return task(p, c, r, h, 64, 64, 1, space);
    if (size == 128) return task(p, c, r, h, 128, 128, 1, space);
#endif
    task(p, c, r, h, (int)c->size, (int)c->value_size, (int)c->half, space);
}

/* All rows and heads; returns 0, or 1 where there is no memory. */
int attend(const Plan *p, const Call *c, int threads) {
    int64_t most = 0;
    for (int64_t r = 0; r < p->rows_count; r++) {
        int64_t n = p->starts[r + 1] - p->starts[r];
        if (n > most) most = n;
    }
    most *= c->heads / c->kv_heads;
    size_t need = sizeof(float) * (most * (c->size + c->value_size + 2) + QT * KC + W);
#if TILES
    const int by_tiles = tiles_fit(c);
    if (by_tiles) need = tiles_need(most, c->size, c->value_size);
#else
    const int by_tiles = 0;
#endif
    const int64_t tasks = p->rows_count * c->kv_heads;
    int failed = 0;
    int64_t work = 0;
    for (int64_t r = 0; r < p->rows_count; r++) work += p->length[r] * c->kv_heads * c->size;
    if (work < ATTENTION_ALONE) threads = 1;
#ifdef _OPENMP
#pragma omp parallel num_threads(threads) if (threads > 1)
#endif
    {
        float *space = malloc(need);
        if (!space) failed = 1;
#if TILES
        if (by_tiles) begin_tiles();
#endif
#ifdef _OPENMP
#pragma omp for schedule(dynamic, 1)
#endif
        for (int64_t i = 0; i < tasks; i++)
            if (space && !by_tiles) run(p, c, i / c->kv_heads, i % c->kv_heads, space);
#if TILES
            else if (space) attend_tiles(p, c, i / c->kv_heads, i % c->kv_heads, (char *)space);
        if (by_tiles) end_tiles();
#endif
        free(space);
    }
    (void)threads;
    return failed;
}

/* Attention of few queries over many slots, at the speed at which the slots can be read.

A task is one row and some KV heads: keys and values are read once for all queries and query heads that share them, one head of a block
of slots after another, so that memory is read in order. Slots are read in blocks of KC, aligned to absolute slot numbers, with an
online softmax over the blocks (Milakov & Gimelshein, arXiv 1805.02867), so over finite keys and values the result of a query does not
depend on the other queries or rows of the call. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "calls.h"
#include "tiles.h"
#include "vector.h"

#define QT 6         /* queries that share registers */
#define TOGETHER 128 /* queries, times KV heads, whose sums go through a row's slots together */

/* Prefetches an entry that is read a block later, one at a time between the arithmetic, because the processor does not look that far
   ahead by itself. */
static inline __attribute__((always_inline)) void soon(const void *from, int64_t at, int D, int half) {
    const int64_t bytes = half ? 2 : 4;
    for (int64_t b = 0; b < D * bytes; b += 64) __builtin_prefetch((const char *)from + at * bytes + b, 0, 2);
}

/* scores [QT][W] of QT queries against W keys, `stride` apart */
#define DOTS(NQ)                                                                                   \
    static inline __attribute__((always_inline)) void dots##NQ(                                    \
        const float *q, const void *k, int64_t at, int64_t stride, int64_t next, int64_t step, int D, int half, vec *scores) { \
        vec part[NQ][W];                                                                           \
        for (int j = 0; j < W; j++) {                                                              \
            soon(k, next + j * step, D, half);                                             \
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

#if W == 8
#define ACROSS 2 /* vectors of a value at a time, whose sums for QT queries fit the processor's registers */
#else
#define ACROSS 4
#endif

/* acc [NQ][D] += weights [NQ][n slots] x values; slots that are not live (weight 0 for all queries) are not read */
#define MIX(NQ)                                                                                               \
    static inline __attribute__((always_inline)) void mix##NQ(float *acc, const float *p, const int32_t *live, \
                                                              const void *v, int64_t at, int64_t stride,     \
                                                              int64_t next, int64_t step, int n, int D, int half) {        \
        for (int d = 0; d < D; d += ACROSS * W) {                                                                  \
            int parts = D - d < ACROSS * W ? (D - d) / W : ACROSS;                                                      \
            vec sum[NQ][ACROSS] = {{{0}}};                                                                                 \
            for (int i = 0; i < NQ; i++)                                                                      \
                for (int c = 0; c < ACROSS; c++)                                                                   \
                    if (c < parts) sum[i][c] = *(vec *)(acc + i * D + d + c * W);                             \
            for (int s = 0; s < n; s++) {                                                                     \
                if (!live[s]) continue;                                                                       \
                if (!d) soon(v, next + s * step, D, half);                                            \
                for (int c = 0; c < ACROSS; c++)                                                                   \
                    if (c < parts) {                                                                          \
                        vec x = load(v, at + s * stride + d + c * W, half);                                   \
                        for (int i = 0; i < NQ; i++) sum[i][c] += x * p[i * KC + s];                    \
                    }                                                                                         \
            }                                                                                                 \
            for (int i = 0; i < NQ; i++)                                                                      \
                for (int c = 0; c < ACROSS; c++)                                                                   \
                    if (c < parts) *(vec *)(acc + i * D + d + c * W) = sum[i][c];                             \
        }                                                                                                     \
    }
MIX(1)
MIX(2)
MIX(3)
MIX(4)
MIX(5)
MIX(6)

typedef struct { /* KV heads h0:h1 of a row, whose queries see slots below high; n queries a KV head, N in all */
    int64_t r, h0, h1, t0, n, high;
    float *q, *acc, *m, *l, *w; /* [N][D], [N][DV], [N], [N]; of some queries [QT][KC] */
} Row;

typedef struct { int64_t at, step; } Soon; /* where W entries lie that are read later */

/* While head h is at slots s .. s + W - 1 of block s0, its part of the next block: where all heads of a slot lie one after another, in
   memory's order, which is the order that memory is fastest in. */
static inline __attribute__((always_inline)) Soon later(const Plan *p, const Row *of, int64_t h, int64_t s0, int64_t s, int D, int64_t row,
                                                        int64_t slot, int64_t head) {
    const int64_t heads = of->h1 - of->h0, part = (h - of->h0) * KC + s;
    const int in_order = head == D && slot == heads * D;
    const int64_t to = s0 + KC + (in_order ? part / heads : s);
    if (to + W > of->high) return (Soon){locate(p, of->r, s0 + s, row, slot) + h * head, slot};
    const int64_t at = locate(p, of->r, to, row, slot);
    return in_order ? (Soon){at + part % heads * D, D} : (Soon){at + h * head, slot};
}

/* Slots a:b of block s0, for the queries of KV head h. D, DV and half are constants where this is inlined. */
static inline __attribute__((always_inline)) void block(const Plan *p, const Call *c, const Row *of, int64_t h, int64_t s0, int64_t a,
                                                        int64_t b, int D, int DV, int half) {
    const int64_t group = c->heads / c->kv_heads, r = of->r, t0 = of->t0, n = of->n, end = p->length[r], first = (h - of->h0) * n;
    const float none = -INFINITY;
    float *const q = of->q + first * D, *const acc = of->acc + first * DV, *const m = of->m + first, *const l = of->l + first, *const w = of->w;
    const uint8_t *mask = p->mask ? p->mask + p->mask_at[r] : NULL;
    const int64_t from = mask ? p->mask_from[r] : end, wide = end - from;
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
                    const Soon next = i0 ? (Soon){at, 0} : later(p, of, h, s0, s, D, c->k_row, c->k_slot, c->k_head);
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
                            uint64_t two[2] = {0};
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
    #define DOT(NQ) case NQ: dots##NQ(q + i0 * D, c->keys, at, c->k_slot, next.at, next.step, D, half, score); break;
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
                    const Soon next = i0 ? (Soon){at, 0} : later(p, of, h, s0, s, DV, c->v_row, c->v_slot, c->v_head);
                    vec any = {0};
                    for (int i = 0; i < nq; i++) any += *(vec *)(w + i * KC + s);
                    int32_t live[W] __attribute__((aligned(4 * W)));
                    *(ivec *)live = any != 0;
                    const int some = b - s < W ? (int)(b - s) : W;
    #define ADD(NQ) case NQ: mix##NQ(acc + i0 * DV, w + s, live, c->values, at, c->v_slot, next.at, next.step, some, DV, half); break;
                    switch (nq) { ADD(1) ADD(2) ADD(3) ADD(4) ADD(5) ADD(6) }
                }
            }
}

static inline __attribute__((always_inline)) void task(const Plan *p, const Call *c, int64_t r, int64_t h0, int64_t h1, int D, int DV,
                                                       int half, float *space) {
    const int64_t group = c->heads / c->kv_heads, t0 = p->starts[r], n = (p->starts[r + 1] - t0) * group, N = n * (h1 - h0);
    const int64_t end = p->length[r];
    const float none = -INFINITY;
    float *q = space, *acc = q + N * D, *m = acc + N * DV, *l = m + N;
    int64_t low = end, high = 0;

    for (int64_t x = 0; x < N; x++) { /* query i * group + g of a KV head: the heads of a query are neighbours */
        int64_t i = x % n, t = t0 + i / group, g = (h0 + x / n) * group + i % group, at = t * c->q_token + g * c->q_head;
        for (int d = 0; d < D; d += W) *(vec *)(q + x * D + d) = load(c->query, at + d, half) * c->scale;
        for (int d = 0; d < DV; d += W) *(vec *)(acc + x * DV + d) = (vec){0};
        m[x] = none;
        l[x] = 0;
        if (p->low[t] < low) low = p->low[t];
        if (p->high[t] > high) high = p->high[t];
    }
    if (p->mask) {
        if (p->mask_from[r] < low) low = p->mask_from[r];
        high = end;
    }
    if (high > end) high = end;
    const Row of = {r, h0, h1, t0, n, high, q, acc, m, l, l + N};
    for (int64_t s0 = low / KC * KC; s0 < high; s0 += KC) {
        const int64_t s1 = s0 + KC < high ? s0 + KC : high;
        const int64_t a = s0 > low ? 0 : (low - s0) / W * W;
        for (int64_t h = h0; h < h1; h++) block(p, c, &of, h, s0, a, s1 - s0, D, DV, half);
    }
    for (int64_t x = 0; x < N; x++) {
        int64_t i = x % n, t = t0 + i / group, g = (h0 + x / n) * group + i % group, at = t * c->o_token + g * c->o_head;
        float sum = l[x];
        if (c->sinks) { /* one more logit, which takes weight and gives nothing */
            float sink = c->sinks[g], most = m[x] > sink ? m[x] : sink;
            if (most == none) most = 0;
            float old = m[x] == none ? 0 : expf(m[x] - most);
            for (int d = 0; d < DV; d += W) *(vec *)(acc + x * DV + d) *= old;
            sum = sum * old + expf(sink - most);
            m[x] = most;
        }
        float one = sum > 0 ? 1 / sum : 0;
        if (sum != sum) one = sum; /* what a query sees is not finite: neither is its output */
        for (int d = 0; d < DV; d += W) store(c->out, at + d, *(vec *)(acc + x * DV + d) * one, half);
        if (c->lse) c->lse[t * c->heads + g] = sum == 0 ? none : m[x] + logf(sum);
    }
}

static void some_heads(const Plan *p, const Call *c, int64_t r, int64_t h0, int64_t h1, float *space) {
#if W > 4 || defined(__ARM_NEON)
    const int64_t size = c->size == c->value_size ? c->size : 0;
    if (size == 32 && !c->half) return task(p, c, r, h0, h1, 32, 32, 0, space);
    if (size == 32) return task(p, c, r, h0, h1, 32, 32, 1, space);
    if (size == 64 && !c->half) return task(p, c, r, h0, h1, 64, 64, 0, space);
    if (size == 128 && !c->half) return task(p, c, r, h0, h1, 128, 128, 0, space);
#if !TILES
    if (size == 64) return task(p, c, r, h0, h1, 64, 64, 1, space);
    if (size == 128) return task(p, c, r, h0, h1, 128, 128, 1, space);
#endif
#endif
    task(p, c, r, h0, h1, (int)c->size, (int)c->value_size, (int)c->half, space);
}

static int64_t queries(const Plan *p, const Call *c, int64_t r) { return (p->starts[r + 1] - p->starts[r]) * (c->heads / c->kv_heads); }

static void run(const Plan *p, const Call *c, int64_t r, int64_t h0, int64_t h1, float *space) {
    const int64_t step = queries(p, c, r) * (h1 - h0) > TOGETHER ? 1 : h1 - h0;
    for (int64_t h = h0; h < h1; h += step) some_heads(p, c, r, h, h + step, space);
}

/* All rows and heads; returns 0, or 1 if memory cannot be allocated. */
int attend(const Plan *p, const Call *c, int threads) {
    const int64_t rows = p->rows_count;
    int64_t most = 0, work = 0;
    for (int64_t r = 0; r < rows; r++) {
        if (queries(p, c, r) > most) most = queries(p, c, r);
        work += p->length[r] * c->kv_heads * c->size;
    }
    if (work < ATTENTION_ALONE) threads = 1;
#if TILES
    const int by_tiles = tiles_fit(c);
#else
    const int by_tiles = 0;
#endif
    int64_t parts = threads == 1 ? 1 : rows == 1 ? threads : (4 * threads + rows - 1) / rows; /* of a row's heads: threads end together */
    if (by_tiles || parts > c->kv_heads) parts = c->kv_heads;
    size_t need = sizeof(float) * ((most > TOGETHER ? most : TOGETHER) * (c->size + c->value_size + 2) + QT * KC + W);
#if TILES
    if (by_tiles) need = tiles_need(most, c->size, c->value_size);
#endif
    int failed = 0;
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
        for (int64_t i = 0; i < rows * parts; i++) {
            const int64_t r = i / parts, part = i % parts, h0 = part * c->kv_heads / parts, h1 = (part + 1) * c->kv_heads / parts;
            if (space && !by_tiles) run(p, c, r, h0, h1, space);
#if TILES
            else if (space) attend_tiles(p, c, r, h0, (char *)space);
#endif
        }
#if TILES
        if (by_tiles) end_tiles();
#endif
        free(space);
    }
    (void)threads;
    return failed;
}

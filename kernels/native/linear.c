/* x [M, E] times weight [O, E] transposed, for few rows: a batch of new tokens, or a block of a prompt.

   W outputs at a time against as many rows as sums fit the processor's registers, so that a weight is read from memory once, and sums
   run over the lanes of vectors in one order: a row's result does not depend, to the bit, on how many rows there are. bfloat16 weights
   of float32 rows are widened as they are read. */

#include <stdint.h>
#include <stdlib.h>

#include "calls.h"
#include "tiles.h"
#include "vector.h"

#if W == 8 /* sums for 4 outputs fit 16 registers, or 32 */
#define ROWS 3
#define CASES(ALONE) switch (n) { CASE(1, ALONE) CASE(2, ALONE) CASE(3, ALONE) }
#else
#define ROWS 6
#define CASES(ALONE) switch (n) { CASE(1, ALONE) CASE(2, ALONE) CASE(3, ALONE) CASE(4, ALONE) CASE(5, ALONE) CASE(6, ALONE) }
#endif
#define CASE(N, ALONE) case N: tile##N(x + m * E, weight, 0, E, narrow, made, next, each, ALONE); break;
#define PARTS (W / 4) /* of 4 outputs */

/* The next W outputs' weights are prefetched: all of them spread over the only tile (alone), or `each` bytes for each part of
   one of several tiles. */
#define TILE(N)                                                                                                     \
    static inline __attribute__((always_inline)) void tile##N(const float *x, const void *w, int64_t at, int64_t E, \
                                                              const int half, vec *out, const char *soon,           \
                                                              int64_t each, const int alone) {                      \
        const int64_t bytes = half ? 2 : 4;                                                                         \
        vec part[N][W];                                                                                             \
        for (int j = 0; j < W; j += 4) {                                                                            \
            vec acc[N][4];                                                                                          \
            for (int i = 0; i < N; i++)                                                                             \
                for (int o = 0; o < 4; o++) acc[i][o] = (vec){0};                                                   \
            if (!alone)                                                                                             \
                for (int64_t b = 0; b < each; b += 64) __builtin_prefetch(soon + j / 4 * each + b, 0, 2);           \
            for (int64_t e = 0; W == 8 && e < E; e += W) { /* rows stay in registers */                             \
                vec z[N];                                                                                           \
                for (int i = 0; i < N; i++) {                                                                       \
                    z[i] = *(const vec *)(x + i * E + e);                                                           \
                    HELD(z[i]);                                                                                     \
                }                                                                                                   \
                for (int o = 0; o < 4; o++) {                                                                       \
                    if (alone) __builtin_prefetch(soon + ((j + o) * E + e) * bytes, 0, 2);                          \
                    vec y = load(w, at + (j + o) * E + e, half);                                                    \
                    HELD(y);                                                                                        \
                    for (int i = 0; i < N; i++) acc[i][o] += z[i] * y;                                              \
                }                                                                                                   \
            }                                                                                                       \
            for (int64_t e = 0; W != 8 && e < E; e += W) { /* weights do */                                         \
                vec y[4];                                                                                           \
                for (int o = 0; o < 4; o++) {                                                                       \
                    if (alone) __builtin_prefetch(soon + ((j + o) * E + e) * bytes, 0, 2);                          \
                    y[o] = load(w, at + (j + o) * E + e, half);                                                     \
                }                                                                                                   \
                for (int i = 0; i < N; i++) {                                                                       \
                    const vec z = *(const vec *)(x + i * E + e);                                                    \
                    for (int o = 0; o < 4; o++) acc[i][o] += z * y[o];                                              \
                }                                                                                                   \
            }                                                                                                       \
            for (int i = 0; i < N; i++)                                                                             \
                for (int o = 0; o < 4; o++) part[i][j + o] = acc[i][o];                                             \
        }                                                                                                           \
        for (int i = 0; i < N; i++) out[i] = sums(part[i]);                                                         \
    }
TILE(1)
TILE(2)
TILE(3)
TILE(4)
TILE(5)
TILE(6)

/* Outputs o .. o + W - 1, whose weights are bfloat16 where `narrow` is set; `bytes` at `next` will be needed after them. */
static inline __attribute__((always_inline)) void outputs(const float *x, const void *weight, const void *bias, void *out, int64_t M,
                                                          int64_t O, int64_t E, int64_t o, const char *next, int64_t bytes,
                                                          const int half, const int narrow) {
    const vec more = bias ? load(bias, o, half) : splat(0);
    const int64_t tiles = (M + ROWS - 1) / ROWS, each = bytes / tiles / PARTS / 64 * 64;
    vec made[ROWS] = {{0}};
    for (int64_t m = 0; m < M; m += ROWS, next += PARTS * each) {
        const int n = M - m < ROWS ? (int)(M - m) : ROWS;
        if (tiles == 1) CASES(1)
        else CASES(0)
        for (int i = 0; i < n; i++) store(out, (m + i) * O + o, made[i] + more, half);
    }
}

/* out [M, O]; E and O multiples of W; bias [O] or NULL. Returns 0, or 1 if memory cannot be allocated. */
int linear(const void *x, const void *weight, const void *bias, void *out, int64_t M, int64_t O, int64_t E, int kind, int threads) {
    if (!M) return 0;
    const int half = kind == HALF;
    float *wide = NULL;
    const float *rows = x;
    if (M * O * E < PRODUCT_ALONE) threads = 1;
#if TILES
    if (half && E % 32 == 0 && tiles()) return linear_tiles(x, weight, bias, out, M, O, E, threads);
    if (kind == NARROW && E % 32 == 0 && tiles()) return linear_split(x, weight, bias, out, M, O, E, threads);
#endif
    if (half) {
        wide = malloc(sizeof(float) * M * E);
        if (!wide) return 1;
        for (int64_t i = 0; i < M * E; i += W) *(vec *)(wide + i) = load(x, i, 1);
        rows = wide;
    }
#ifdef _OPENMP
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
#endif
    for (int64_t o = 0; o < O; o += W) {
        const int last = o + W >= O;
        const int64_t bytes = W * E * (kind == WIDE ? 4 : 2);
        const char *mine = (const char *)weight + o / W * bytes, *next = last ? mine : mine + bytes;
        const int64_t soon = last ? 0 : bytes;
        if (kind == HALF) outputs(rows, mine, bias, out, M, O, E, o, next, soon, 1, 1);
        else if (kind == WIDE) outputs(rows, mine, bias, out, M, O, E, o, next, soon, 0, 0);
        else outputs(rows, mine, bias, out, M, O, E, o, next, soon, 0, 1);
    }
    (void)threads;
    free(wide);
    return 0;
}

/* float32 rows times bfloat16 weights. A float32 number is the sum of three bfloat16 ones, exactly (3 x 8 bits for its 24), so that matrix
   units multiply it by a bfloat16 weight in three products, each exact in float32, and sum in float32. (They take what is below 2^-126 for
   0, and infinity minus itself is NaN: an infinite input gives NaN.) */

#include <stdlib.h>
#include <string.h>

#include "calls.h"
#include "tiles.h"
#include "vector.h"

/* W rows of weights [16, E] as linear reads them where weights are NARROW: rows of bfloat16, or, for matrix units, [E / 32] tiles of
   16 pairs of numbers by 16 outputs. Returns bits of numbers that are not bfloat16 ones. */
static uint32_t narrow_rows(const uint32_t *weight, uint16_t *into, int64_t E, int by_tile) {
    uint32_t lost = 0;
    if (!by_tile)
        for (int64_t i = 0; i < W * E; i++) {
            lost |= weight[i];
            into[i] = weight[i] >> 16;
        }
    else
        for (int64_t o = 0; o < W; o++)
            for (int64_t e = 0; e < E; e += 2) {
                const uint32_t *pair = weight + o * E + e;
                lost |= pair[0] | pair[1];
                ((uint32_t *)into)[e / 32 * 16 * W + e % 32 / 2 * W + o] = pair[0] >> 16 | (pair[1] & 0xffff0000);
            }
    return lost & 0xffff;
}

/* A fingerprint of x [n], n a multiple of 8 W: MurmurHash3 (Appleby) of 8 W streams at a time, then of their sums. If one number
   differs, so does the result, because each step is one to one. If more do, it is the same by a chance of about 2^-32. */
static uint64_t fingerprint(const uint32_t *x, int64_t n) {
    uvec sums[8];
    for (int j = 0; j < 8; j++) sums[j] = (uvec){0} + (uint32_t)j;
    for (int64_t i = 0; i < n; i += 8 * W)
        for (int j = 0; j < 8; j++) {
            uvec some;
            memcpy(&some, x + i + j * W, sizeof some);
            some *= 0xcc9e2d51u;
            some = (some << 15 | some >> 17) * 0x1b873593u;
            sums[j] ^= some;
            sums[j] = (sums[j] << 13 | sums[j] >> 19) * 5 + 0xe6546b64u;
        }
    uint64_t all = n;
    for (int j = 0; j < 8; j++)
        for (int o = 0; o < W; o++) {
            all = (all ^ sums[j][o]) * 0xff51afd7ed558ccdu;
            all ^= all >> 33;
        }
    return all;
}

/* Makes `into` the copy of weight [O, E], writing only what differs, so that other threads may read a current copy meanwhile; nothing is
   compared where the weight still has the fingerprint `seen`. Returns 1 where a number is not a bfloat16 one, and 2 if memory cannot be allocated. */
int narrow(const uint32_t *weight, uint16_t *into, int64_t O, int64_t E, uint64_t *seen) {
    const uint64_t print = fingerprint(weight, O * E);
    if (print == *seen) return 0;
    const int by_tile = E % 32 == 0 && tiles();
    const int64_t bytes = W * E * 2;
    uint16_t *made = malloc(bytes);
    if (!made) return 2;
    int lost = 0;
    for (int64_t o = 0; o < O && !lost; o += W) {
        lost = narrow_rows(weight + o * E, made, E, by_tile) != 0;
        if (!lost && memcmp(into + o * E, made, bytes)) memcpy(into + o * E, made, bytes);
    }
    free(made);
    *seen = lost ? 0 : print;
    return lost;
}

#if TILES

#define PART (W * 32) /* numbers of a tile */

/* rows [M, E] as left operands: [M / 16][E / 32][3] tiles of 16 rows by 32; missing rows are 0 */
static void split(const float *x, int64_t M, int64_t E, uint16_t *into) {
    for (int64_t m = 0; m < M; m += W, into += 3 * W * E) {
        const int rows = M - m < W ? (int)(M - m) : W;
        if (rows < W) memset(into, 0, 3 * W * E * 2);
        for (int n = 0; n < rows; n++)
            for (int64_t e = 0; e < E; e += W) {
                vec rest = *(const vec *)(x + (m + n) * E + e);
                uint16_t *to = into + e / 32 * 3 * PART + n * 32 + e % 32;
                for (int s = 0; s < 3; s++, to += PART) {
                    const uvec top = (uvec)rest & 0xffff0000u;
                    *(hvec *)to = __builtin_convertvector(top >> 16, hvec);
                    rest -= (vec)top;
                }
            }
    }
}

/* `groups` times 16 outputs from o on by `columns` times 16 rows: at most four tiles of sums */
static inline __attribute__((always_inline)) void square(const uint16_t *x, const uint16_t *w, const float *bias, float *out, int64_t M,
                                                         int64_t O, int64_t E, int64_t o, int64_t m, const int groups,
                                                         const int columns) {
    float sums[4][W * W] __attribute__((aligned(64)));
    const int64_t down = W * E, across = 3 * W * E;
    w += o * E;
    x += 3 * m * E;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    WRITTEN();
    for (int64_t e = 0; e < E; e += 32, w += PART, x += 3 * PART) {
        if (columns == 1) {
            _tile_loadd(4, x, 64);
            _tile_loadd(5, x + PART, 64);
            _tile_loadd(6, x + 2 * PART, 64);
#define GROUP(G)                          \
    if (groups > G) {                     \
        _tile_loadd(7, w + G * down, 64); \
        _tile_dpbf16ps(G, 4, 7);          \
        _tile_dpbf16ps(G, 5, 7);          \
        _tile_dpbf16ps(G, 6, 7);          \
    }
            GROUP(0)
            GROUP(1)
            GROUP(2)
            GROUP(3)
        } else {
            _tile_loadd(6, w, 64);
            if (groups > 1) _tile_loadd(7, w + down, 64);
            for (int s = 0; s < 3; s++) {
                _tile_loadd(4, x + s * PART, 64);
                _tile_loadd(5, x + s * PART + across, 64);
                _tile_dpbf16ps(0, 4, 6);
                _tile_dpbf16ps(1, 5, 6);
                if (groups > 1) {
                    _tile_dpbf16ps(2, 4, 7);
                    _tile_dpbf16ps(3, 5, 7);
                }
            }
        }
    }
    _tile_stored(0, sums[0], 64);
    _tile_stored(1, sums[1], 64);
    _tile_stored(2, sums[2], 64);
    _tile_stored(3, sums[3], 64);
    for (int g = 0; g < groups; g++) {
        const vec more = bias ? *(const vec *)(bias + o + g * W) : splat(0);
        for (int c = 0; c < columns; c++)
            for (int64_t n = 0; n < W && m + c * W + n < M; n++)
                *(vec *)(out + (m + c * W + n) * O + o + g * W) = *(const vec *)(sums[g * columns + c] + n * W) + more;
    }
}

static void some(const float *x, const uint16_t *weight, const float *bias, float *out, int64_t M, int64_t O, int64_t E,
                 uint16_t *rows, int threads) {
    split(x, M, E, rows);
#ifdef _OPENMP
#pragma omp parallel num_threads(threads) if (threads > 1)
#endif
    {
        begin_tiles();
#ifdef _OPENMP
#pragma omp for schedule(static)
#endif
        for (int64_t o = 0; o < O; o += 4 * W) BY_SQUARES(rows);
        end_tiles();
    }
    (void)threads;
}

#define MOST 256 /* rows at a time, so that what they are split into stays in the cache */

int linear_split(const float *x, const uint16_t *weight, const float *bias, float *out, int64_t M, int64_t O, int64_t E, int threads) {
    const int64_t most = M < MOST ? (M + W - 1) / W * W : MOST;
    uint16_t *rows = aligned_alloc(64, most * E * 6);
    if (!rows) return 1;
    for (int64_t m = 0; m < M; m += most) some(x + m * E, weight, bias, out + m * O, M - m < most ? M - m : most, O, E, rows, threads);
    free(rows);
    return 0;
}

#endif

/* Products of few rows in bfloat16 by matrix units.

Sixteen outputs' weights are the left operand, as they lie in memory, and the rows of x, packed once, the right one: weights are read
once, at the speed of memory, for all rows. A row's result does not depend, to the bit, on how many rows there are. */

#include <stdlib.h>
#include <string.h>

#include "calls.h"
#include "tiles.h"
#include "vector.h"

#if TILES

#include <sys/syscall.h>
#include <unistd.h>

#define ARCH_REQ_XCOMP_PERM 0x1023
#define XTILEDATA 18

int tiles(void) {
    static int found = -1;
    if (found < 0) found = syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XTILEDATA) == 0;
    return found;
}

/* rows [M, E] as right operands: [M / 16][E / 32] tiles of 16 pairs of numbers by 16 rows; missing rows are 0 */
static void pack(const uint32_t *x, int64_t M, int64_t E, uint32_t *into) {
    for (int64_t m = 0; m < M; m += W) {
        const int rows = M - m < W ? (int)(M - m) : W;
        if (rows < W) memset(into, 0, E / 2 * W * 4);
        for (int64_t e = 0; e < E / 2; e++, into += W)
            for (int n = 0; n < rows; n++) into[n] = x[(m + n) * E / 2 + e];
    }
}

/* sums [16 outputs][16 rows] of one tile, plus bias, to rows m.. of out */
static inline __attribute__((always_inline)) void put_rows(const float *sums, const void *bias, uint16_t *out, int64_t m, int64_t M,
                                                           int64_t O, int64_t o) {
    const vec more = bias ? load(bias, o, 1) : splat(0);
    const int rows = M - m < W ? (int)(M - m) : W;
    for (int n = 0; n < rows; n++) {
        const vec made = (vec)_mm512_i32gather_ps((__m512i)(LANES * W), sums + n, 4);
        store(out, (m + n) * O + o, made + more, 1);
    }
}

/* `groups` times 16 outputs from o on by `columns` times 16 rows: at most four tiles of sums, so that none waits for itself */
static inline __attribute__((always_inline)) void square(const uint32_t *x, const uint16_t *w, const void *bias, uint16_t *out,
                                                         int64_t M, int64_t O, int64_t E, int64_t o, int64_t m, const int groups,
                                                         const int columns) {
    float sums[4][W * W] __attribute__((aligned(64)));
    const int64_t each = E / 32, down = W * E, across = each * W * W;
    w += o * E;
    x += m / W * across;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    WRITTEN();
    for (int64_t k = 0; k < each; k++, w += 32, x += W * W) {
        if (columns == 1) {
            _tile_loadd(7, x, 64);
            _tile_loadd(4, w, E * 2);
            _tile_dpbf16ps(0, 4, 7);
            if (groups > 1) {
                _tile_loadd(5, w + down, E * 2);
                _tile_dpbf16ps(1, 5, 7);
            }
            if (groups > 2) {
                _tile_loadd(6, w + 2 * down, E * 2);
                _tile_dpbf16ps(2, 6, 7);
                _tile_loadd(4, w + 3 * down, E * 2);
                _tile_dpbf16ps(3, 4, 7);
            }
        } else {
            _tile_loadd(6, x, 64);
            _tile_loadd(7, x + across, 64);
            _tile_loadd(4, w, E * 2);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            if (groups > 1) {
                _tile_loadd(5, w + down, E * 2);
                _tile_dpbf16ps(2, 5, 6);
                _tile_dpbf16ps(3, 5, 7);
            }
        }
    }
    _tile_stored(0, sums[0], 64);
    _tile_stored(1, sums[1], 64);
    _tile_stored(2, sums[2], 64);
    _tile_stored(3, sums[3], 64);
    for (int g = 0; g < groups; g++)
        for (int c = 0; c < columns; c++) put_rows(sums[g * columns + c], bias, out, m + c * W, M, O, o + g * W);
}

int linear_tiles(const void *x, const void *weight, const void *bias, void *out, int64_t M, int64_t O, int64_t E, int threads) {
    const int64_t blocks = (M + W - 1) / W;
    uint32_t *packed = aligned_alloc(64, blocks * W * E * 2);
    if (!packed) return 1;
    pack(x, M, E, packed);
#ifdef _OPENMP
#pragma omp parallel num_threads(threads) if (threads > 1)
#endif
    {
        begin_tiles();
#ifdef _OPENMP
#pragma omp for schedule(static)
#endif
        for (int64_t o = 0; o < O; o += 4 * W) BY_SQUARES(packed);
        end_tiles();
    }
    (void)threads;
    free(packed);
    return 0;
}

#endif

/* Matrix units for bfloat16 (AMX): tiles of 16 rows of 64 bytes. `tiles()` says whether there are any, on processors that have them and
   where the system lets a process use them. Every thread sets its own up before it begins, and gives them back. */

#pragma once
#include <stdint.h>

#if defined(__AMX_BF16__) && defined(__AVX512F__) && defined(__AVX512BW__) && defined(__linux__) && !defined(NO_TILES)
#define TILES 1
#include <immintrin.h>

int tiles(void);

/* Makes earlier writes visible to tile loads: compilers do not know that these read memory. */
#define WRITTEN() __asm__ volatile("" ::: "memory")

static inline void begin_tiles(void) {
    struct {
        uint8_t palette, start, zero[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } all = {.palette = 1};
    for (int i = 0; i < 8; i++) {
        all.bytes[i] = 64;
        all.rows[i] = 16;
    }
    WRITTEN();
    _tile_loadconfig(&all);
}

static inline void end_tiles(void) { _tile_release(); }

/* Up to 64 outputs from o on for all M rows, by a file's own square: 32 x 32 numbers at a time, and 64 x 16 for the last rows. */
#define BY_SQUARES(X)                                                                                                  \
    do {                                                                                                               \
        const int64_t groups = O - o < 4 * W ? (O - o) / W : 4;                                                        \
        int64_t m = 0;                                                                                                 \
        for (; m + W < M; m += 2 * W)                                                                                  \
            for (int64_t g = 0; g < groups; g += 2) {                                                                  \
                if (groups - g > 1) square(X, weight, bias, out, M, O, E, o + g * W, m, 2, 2);                         \
                else square(X, weight, bias, out, M, O, E, o + g * W, m, 1, 2);                                        \
            }                                                                                                          \
        if (m < M && groups == 4) square(X, weight, bias, out, M, O, E, o, m, 4, 1);                                   \
        else if (m < M)                                                                                                \
            for (int64_t g = 0; g < groups; g++) square(X, weight, bias, out, M, O, E, o + g * W, m, 1, 1);            \
    } while (0)

#else
#define TILES 0
static inline int tiles(void) { return 0; }
#endif

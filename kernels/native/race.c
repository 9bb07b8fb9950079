/* The random numbers of exponential races: words 0 and 1 of Philox-4x32-10 (Salmon et al., SC 2011) for every (seed, position, token). */

#include <stdint.h>

#include "vector.h"

#define TARGET 3 /* rng.TARGET: the stream that asks */

/* out [rows, columns]: (k + 1/2) 2^-53 with 53 random bits k. token [columns], or [rows, columns] with token_row = columns;
   position and seed [rows]. */
void race_numbers(double *restrict out, const int64_t *token, int64_t token_row, const int64_t *position, const int64_t *seed,
                  int64_t rows, int64_t columns) {
    for (int64_t r = 0; r < rows; r++) {
        const uint32_t at = (uint32_t)position[r], key0 = (uint32_t)seed[r], key1 = (uint32_t)((uint64_t)seed[r] >> 32);
        for (int64_t v = 0; v < columns; v += W) {
            const int64_t some = columns - v < W ? columns - v : W;
            uint32_t c0[W], c1[W], c2[W], c3[W];
            for (int j = 0; j < W; j++) {
                c0[j] = at;
                c1[j] = j < some ? (uint32_t)token[r * token_row + v + j] : 0;
                c2[j] = TARGET;
                c3[j] = 0;
            }
            uint32_t k0 = key0, k1 = key1;
            for (int round = 0; round < 10; round++) {
                for (int j = 0; j < W; j++) {
                    const uint64_t p0 = (uint64_t)c0[j] * 0xD2511F53u, p1 = (uint64_t)c2[j] * 0xCD9E8D57u;
                    c0[j] = (uint32_t)(p1 >> 32) ^ c1[j] ^ k0;
                    c2[j] = (uint32_t)(p0 >> 32) ^ c3[j] ^ k1;
                    c1[j] = (uint32_t)p1;
                    c3[j] = (uint32_t)p0;
                }
                k0 += 0x9E3779B9u;
                k1 += 0xBB67AE85u;
            }
            double made[W];
            for (int j = 0; j < W; j++) {
                const int64_t bits = (int64_t)(((uint64_t)(c0[j] >> 5) << 26) | (c1[j] >> 6));
                made[j] = ((double)bits + 0.5) * 0x1p-53;
            }
            for (int j = 0; j < some; j++) out[r * columns + v + j] = made[j];
        }
    }
}

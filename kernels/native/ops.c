/* The operators between the matrix products of a llama block, each in one pass instead of several PyTorch operators.
   Tensors are float32, or bfloat16 where half is set; sums are float32. */

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "calls.h"
#include "vector.h"

#define MOST 512 /* largest head size of rotary embeddings */
#define INLINE static inline __attribute__((always_inline))

INLINE void add_norm_(void *restrict x, const void *restrict y, const void *restrict weight, void *restrict out, int64_t rows,
                      int64_t n, float eps, const int half) {
    for (int64_t r = 0; r < rows; r++) {
        const int64_t at = r * n;
        float sum[W] = {0}, all = 0;
        if (y)
            for (int64_t i = 0; i < n; i++) put(x, at + i, get(x, at + i, half) + get(y, at + i, half), half);
        int64_t i = 0;
        for (; i + W <= n; i += W)
            for (int j = 0; j < W; j++) {
                const float a = get(x, at + i + j, half);
                sum[j] += a * a;
            }
        for (; i < n; i++) all += get(x, at + i, half) * get(x, at + i, half);
        for (int j = 0; j < W; j++) all += sum[j];
        const float by = 1.0f / sqrtf(all / n + eps);
        for (i = 0; i < n; i++) put(out, at + i, get(x, at + i, half) * by * get(weight, i, half), half);
    }
}

/* x [rows, n] += y (unless y is NULL), then out = x / rms(x) * weight */
void add_norm(void *x, const void *y, const void *weight, void *out, int64_t rows, int64_t n, float eps, int half) {
    if (half) add_norm_(x, y, weight, out, rows, n, eps, 1);
    else add_norm_(x, y, weight, out, rows, n, eps, 0);
}

INLINE void turn_(void *restrict x, const float *restrict cos, const float *restrict sin, int64_t T, int64_t heads, int64_t size,
                  const int half) {
    const int64_t mid = size / 2;
    for (int64_t t = 0; t < T; t++) {
        const float *c = cos + t * size, *s = sin + t * size;
        for (int64_t h = 0; h < heads; h++) {
            const int64_t low = (t * heads + h) * size, high = low + mid;
            float a[MOST / 2], b[MOST / 2];
            for (int64_t d = 0; d < mid; d++) {
                a[d] = get(x, low + d, half);
                b[d] = get(x, high + d, half);
            }
            for (int64_t d = 0; d < mid; d++) {
                put(x, low + d, a[d] * c[d] - b[d] * s[d], half);
                put(x, high + d, b[d] * c[d + mid] + a[d] * s[d + mid], half);
            }
        }
    }
}

/* Rotary embedding (rotate_half) in place: x [T, heads, size], contiguous, size <= MOST; cos and sin [T, size], float32. */
void turn(void *x, const float *cos, const float *sin, int64_t T, int64_t heads, int64_t size, int half) {
    if (half) turn_(x, cos, sin, T, heads, size, 1);
    else turn_(x, cos, sin, T, heads, size, 0);
}

/* Entries into slots: from [T, heads, bytes] with strides in bytes; slots [T] are numbers in [rows * capacity]. Returns 0, or 1
   for a number that is none, before anything is written. */
int keep(char *into, const char *from, const int64_t *slots, int64_t T, int64_t heads, int64_t bytes, int64_t rows,
         int64_t capacity, int64_t to_row, int64_t to_slot, int64_t to_head, int64_t from_token, int64_t from_head) {
    for (int64_t t = 0; t < T; t++)
        if (slots[t] < 0 || slots[t] >= rows * capacity) return 1;
    for (int64_t t = 0; t < T; t++) {
        char *at = into + slots[t] / capacity * to_row + slots[t] % capacity * to_slot;
        for (int64_t h = 0; h < heads; h++) memcpy(at + h * to_head, from + t * from_token + h * from_head, bytes);
    }
    return 0;
}

INLINE void silu_mul_(void *restrict gate, const void *restrict up, int64_t n, const int half) {
    const int bytes = half ? 2 : 4;
    for (int64_t i = 0; i < n; i += W) {
        const int64_t some = n - i < W ? n - i : W;
        float tail[2][W] = {{0}};
        vec x, y;
        if (some == W) {
            x = load(gate, i, half);
            y = load(up, i, half);
        } else {
            memcpy(tail[0], (const char *)gate + i * bytes, some * bytes);
            memcpy(tail[1], (const char *)up + i * bytes, some * bytes);
            x = load(tail[0], 0, half);
            y = load(tail[1], 0, half);
        }
        const vec e = exp_neg((vec)((ivec)x | (int32_t)0x80000000));
        const ivec below = x < 0;
        const vec share = (vec)(((ivec)e & below) | ((ivec)splat(1) & ~below)) / (1.0f + e);
        const vec made = x * share * y;
        if (some == W) {
            store(gate, i, made, half);
        } else {
            store(tail[0], 0, made, half);
            memcpy((char *)gate + i * bytes, tail[0], some * bytes);
        }
    }
}

/* gate [n] = silu(gate) * up; with e = exp(-|x|), silu(x) = x / (1 + e) or x e / (1 + e) */
void silu_mul(void *gate, const void *up, int64_t n, int half) {
    if (half) silu_mul_(gate, up, n, 1);
    else silu_mul_(gate, up, n, 0);
}

/* Vectors of W numbers: as many as a register of the processor holds. More would be kept in memory by some compilers. */

#pragma once
#include <stdint.h>

#if defined(__AVX512F__)
#define W 16
#elif defined(__AVX__)
#include <immintrin.h>
#define W 8
#else
#define W 4
#ifdef __ARM_NEON
#include <arm_neon.h>
#endif
#endif

typedef float vec __attribute__((vector_size(4 * W), aligned(4)));
typedef int32_t ivec __attribute__((vector_size(4 * W)));
typedef uint16_t hvec __attribute__((vector_size(2 * W), aligned(2)));
typedef uint8_t bvec __attribute__((vector_size(W), aligned(1)));
typedef uint32_t uvec __attribute__((vector_size(4 * W)));

/* Keeps x in a register, where compilers would read it from memory for every use. */
#if W == 8
#define HELD(x) __asm__("" : "+x"(x))
#else
#define HELD(x)
#endif

static inline vec splat(float x) { return (vec){0} + x; }

/* exp for x <= 0: 2^n p(r), Cephes' polynomial; below -87 it is 0, and so is -inf. */
static inline vec exp_neg(vec x) {
    ivec small = x < -87.0f;
    vec z = x * 1.44269504088896341f;
    vec n = __builtin_convertvector(__builtin_convertvector(z - 0.5f, ivec), vec);
    vec r = x - n * 0.693359375f + n * 2.12194440e-4f;
    vec p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    ivec power = (__builtin_convertvector(n, ivec) + 127) << 23;
    vec made = p * (vec)power;
    return (vec)((ivec)made & ~small);
}

/* cap tanh(x / cap); tanh(y) = sign(y) (1 - e) / (1 + e), e = exp(-2 |y|) */
static inline vec capped(vec x, float cap) {
    const vec y = x / cap;
    const ivec sign = (ivec)y & (int32_t)0x80000000;
    const vec e = exp_neg((vec)((ivec)y & 0x7fffffff) * -2.0f);
    return (vec)((ivec)((1.0f - e) / (1.0f + e)) | sign) * cap;
}

static inline float top(vec x) {
    float m = x[0];
    for (int i = 1; i < W; i++) m = x[i] > m ? x[i] : m;
    return m;
}

static inline float total(vec x) {
    float s = 0;
    for (int i = 0; i < W; i++) s += x[i];
    return s;
}

#if W == 16
static const ivec LANES = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
#elif W == 8
static const ivec LANES = {0, 1, 2, 3, 4, 5, 6, 7};
#else
static const ivec LANES = {0, 1, 2, 3};
#endif

/* Values are float32, or bfloat16 if half is set. */

static inline vec load(const void *p, int64_t at, int half) {
    if (half) {
#if W == 8 && defined(__AVX2__) /* which compilers do not find */
        uvec w = (uvec)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)((const uint16_t *)p + at)));
#elif W == 4 && defined(__ARM_NEON)
        uvec w = (uvec)vmovl_u16(vld1_u16((const uint16_t *)p + at));
#else
        uvec w = __builtin_convertvector(*(const hvec *)((const uint16_t *)p + at), uvec);
#endif
        return (vec)(w << 16);
    }
    return *(const vec *)((const float *)p + at);
}

static inline void store(void *p, int64_t at, vec x, int half) {
    if (half) { /* to nearest, ties to even; NaN stays NaN */
        uvec w = (uvec)x, odd = (w >> 16) & 1u;
        uvec made = (w + 0x7fffu + odd) >> 16;
        ivec nan = x != x;
        made = ((uvec)nan & 0x7fc0u) | (~(uvec)nan & made);
        *(hvec *)((uint16_t *)p + at) = __builtin_convertvector(made, hvec);
    } else {
        *(vec *)((float *)p + at) = x;
    }
}

static inline __attribute__((always_inline)) float get(const void *p, int64_t at, const int half) {
    if (!half) return ((const float *)p)[at];
    union {
        uint32_t u;
        float f;
    } x = {(uint32_t)((const uint16_t *)p)[at] << 16};
    return x.f;
}

static inline __attribute__((always_inline)) void put(void *p, int64_t at, float f, const int half) {
    if (!half) {
        ((float *)p)[at] = f;
        return;
    }
    union {
        float f;
        uint32_t u;
    } x = {f};
    const uint32_t made = (x.u + 0x7fffu + ((x.u >> 16) & 1u)) >> 16;
    ((uint16_t *)p)[at] = f == f ? (uint16_t)made : 0x7fc0;
}

#if defined(__GNUC__) && !defined(__clang__) && __GNUC__ < 12
#define PAIR(a, b, ...) __builtin_shuffle(a, b, (ivec){__VA_ARGS__})
#else
#define PAIR __builtin_shufflevector
#endif

/* The W sums over the lanes of W vectors. */
static inline vec sums(const vec *x) {
#if W == 16
    vec y[8], z[4], u[2];
    for (int i = 0; i < 8; i++)
        y[i] = PAIR(x[2 * i], x[2 * i + 1], 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30) +
               PAIR(x[2 * i], x[2 * i + 1], 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31);
    for (int i = 0; i < 4; i++)
        z[i] = PAIR(y[2 * i], y[2 * i + 1], 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
               PAIR(y[2 * i], y[2 * i + 1], 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
    for (int i = 0; i < 2; i++)
        u[i] = PAIR(z[2 * i], z[2 * i + 1], 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27) +
               PAIR(z[2 * i], z[2 * i + 1], 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
    return PAIR(u[0], u[1], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
           PAIR(u[0], u[1], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
#elif W == 8
    vec y[4], z[2];
    for (int i = 0; i < 4; i++)
        y[i] = PAIR(x[2 * i], x[2 * i + 1], 0, 8, 2, 10, 4, 12, 6, 14) + PAIR(x[2 * i], x[2 * i + 1], 1, 9, 3, 11, 5, 13, 7, 15);
    for (int i = 0; i < 2; i++)
        z[i] = PAIR(y[2 * i], y[2 * i + 1], 0, 1, 8, 9, 4, 5, 12, 13) + PAIR(y[2 * i], y[2 * i + 1], 2, 3, 10, 11, 6, 7, 14, 15);
    return PAIR(z[0], z[1], 0, 1, 2, 3, 8, 9, 10, 11) + PAIR(z[0], z[1], 4, 5, 6, 7, 12, 13, 14, 15);
#else
    const vec y = PAIR(x[0], x[1], 0, 4, 2, 6) + PAIR(x[0], x[1], 1, 5, 3, 7), z = PAIR(x[2], x[3], 0, 4, 2, 6) + PAIR(x[2], x[3], 1, 5, 3, 7);
    return PAIR(y, z, 0, 1, 4, 5) + PAIR(y, z, 2, 3, 6, 7);
#endif
}

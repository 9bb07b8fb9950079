/* Arguments of the kernels, and the functions that they share. */

#pragma once
#include <stdint.h>

/* Which slots each packed query sees. */
typedef struct {
    const int32_t *rows, *starts, *length; /* [R], [R + 1], [R]: buffer row, first packed query, slots in use */
    const int32_t *low, *high;             /* [T]: a query sees the slots low <= s < high, */
    const uint8_t *mask;                   /* and, as its row's mask allows, slots from mask_from on, or NULL */
    const int32_t *mask_from;              /* [R] */
    const int64_t *mask_at;                /* [R]: where the row's mask [heads or 1, queries, length - mask_from] begins */
    const int64_t *mask_head;              /* [R]: bytes between the heads of a row's mask, 0 for one mask for all */
    const int32_t *table;                  /* [R, pages]: page numbers, or NULL for slots */
    int64_t rows_count, pages, page;
} Plan;

typedef struct {
    const void *keys, *values, *query; /* strides in elements */
    void *out;
    float *lse;
    const float *sinks;
    int64_t k_row, k_slot, k_head, v_row, v_slot, v_head, q_token, q_head, o_token, o_head;
    int64_t heads, kv_heads, size, value_size, half; /* half: keys, values, queries and output are bfloat16 */
    float scale, softcap;
} Call;

typedef struct {
    const void *before, *after, *query_norm, *key_norm; /* norms: [E], [E], and [size] or NULL */
    const void *query, *query_bias, *key, *key_bias, *value, *value_bias, *out, *out_bias; /* weights; biases may be NULL */
    const void *gate, *gate_bias, *up, *up_bias, *down, *down_bias;
    int64_t heads, kv_heads, size, inner;
    int64_t narrow; /* weights of products are as narrow() makes them */
    float before_eps, after_eps, query_norm_eps, key_norm_eps, scale;
} Block;

typedef struct { /* keys and values of one layer, [rows, capacity, kv_heads, size]; strides in elements */
    void *keys, *values;
    int64_t k_row, k_slot, k_head, v_row, v_slot, v_head, rows, capacity;
} Buffer;

/* dtypes of linear: float32, bfloat16, or float32 rows by bfloat16 weights */
enum { WIDE, HALF, NARROW };

enum { FINE, NO_MEMORY, NO_SLOT, NO_TOKEN };

/* Work below which one thread is used, because waking another takes longer; measured by recipes/cpu_kernels.py. */
#ifndef ATTENTION_ALONE
#define ATTENTION_ALONE (1 << 17) /* numbers of the keys that are read */
#endif
#ifndef PRODUCT_ALONE
#define PRODUCT_ALONE (1 << 18) /* multiplications */
#endif

#define KC 64 /* slots of a block of attention; a page holds a multiple of 16 */

/* offset of a slot in elements */
static inline int64_t locate(const Plan *p, int64_t r, int64_t slot, int64_t row, int64_t stride) {
    if (p->table) return p->table[r * p->pages + slot / p->page] * row + slot % p->page * stride;
    return p->rows[r] * row + slot * stride;
}

int attend(const Plan *plan, const Call *call, int threads);
void add_norm(void *x, const void *y, const void *weight, void *out, int64_t rows, int64_t n, float eps, int half);
void turn(void *x, const float *cos, const float *sin, int64_t T, int64_t heads, int64_t size, int half);
int keep(char *into, const char *from, const int64_t *slots, int64_t T, int64_t heads, int64_t bytes, int64_t rows,
         int64_t capacity, int64_t to_row, int64_t to_slot, int64_t to_head, int64_t from_token, int64_t from_head);
void silu_mul(void *gate, const void *up, int64_t n, int half);
int linear(const void *x, const void *weight, const void *bias, void *out, int64_t M, int64_t O, int64_t E, int kind, int threads);
int linear_tiles(const void *x, const void *weight, const void *bias, void *out, int64_t M, int64_t O, int64_t E, int threads);
int linear_split(const float *x, const uint16_t *weight, const float *bias, float *out, int64_t M, int64_t O, int64_t E, int threads);
int tiles_fit(const Call *call);
int64_t tiles_need(int64_t n, int64_t size, int64_t value_size);
void attend_tiles(const Plan *plan, const Call *call, int64_t r, int64_t h, char *space);
int blocks(const Block *some, const Buffer *buffers, const Plan *const *plans, void *const *taps, int64_t count, const void *first,
           int64_t inputs, void *x, int64_t T, int64_t E, const float *cos, const float *sin, const int64_t *slots, int half, int threads);

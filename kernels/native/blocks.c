/* Blocks of a llama-like model over few packed tokens, one after the other: the kernels of this folder in the order in which
   specdec/forward/llama_c.py calls them one by one, and so the same results to the bit. */

#include <stdlib.h>
#include <string.h>

#include "calls.h"

/* keys and values of T normed inputs y into their slots; k and v: scratch memory */
static int entries(const Block *b, const Buffer *into, const void *y, char *k, char *v, int64_t T, int64_t E, const float *cos,
                   const float *sin, const int64_t *slots, int half, int threads) {
    const int64_t wide = b->kv_heads * b->size, bytes = half ? 2 : 4, each = b->size * bytes;
    char *made = b->key_norm ? v : k;
    const int kind = b->narrow ? NARROW : half;
    if (linear(y, b->key, b->key_bias, made, T, wide, E, kind, threads)) return NO_MEMORY;
    if (b->key_norm) add_norm(made, NULL, b->key_norm, k, T * b->kv_heads, b->size, b->key_norm_eps, half);
    if (linear(y, b->value, b->value_bias, v, T, wide, E, kind, threads)) return NO_MEMORY;
    turn(k, cos, sin, T, b->kv_heads, b->size, half);
    if (keep(into->keys, k, slots, T, b->kv_heads, each, into->rows, into->capacity, into->k_row * bytes, into->k_slot * bytes,
             into->k_head * bytes, wide * bytes, each))
        return NO_SLOT;
    keep(into->values, v, slots, T, b->kv_heads, each, into->rows, into->capacity, into->v_row * bytes, into->v_slot * bytes,
         into->v_head * bytes, wide * bytes, each);
    return FINE;
}

/* One block's keys and values of x [T, E], for tokens whose own queries are not needed; `normed`: x is normed already. */
int remember(const Block *b, const Buffer *into, int normed, const void *x, int64_t T, int64_t E, const float *cos, const float *sin,
             const int64_t *slots, int half, int threads) {
    const int64_t bytes = half ? 2 : 4, wide = b->kv_heads * b->size;
    char *y = malloc((T * E + 2 * T * wide) * bytes);
    if (!y) return NO_MEMORY;
    if (!normed) add_norm((void *)x, NULL, b->before, y, T, E, b->before_eps, half);
    char *k = y + T * E * bytes;
    const int done = entries(b, into, normed ? x : y, k, k + T * wide * bytes, T, E, cos, sin, slots, half, threads);
    free(y);
    return done;
}

/* x [T, E] through `count` blocks, in place. first [T, inputs]: what the first block reads in place of the norm of x, or NULL. plans [count]; taps [count + 1]: where the inputs of each block, and the result, are
   copied to, or NULL. */
int blocks(const Block *some, const Buffer *buffers, const Plan *const *plans, void *const *taps, int64_t count, const void *first,
           int64_t inputs, void *x, int64_t T, int64_t E, const float *cos, const float *sin, const int64_t *slots, int half,
           int threads) {
    const int64_t bytes = half ? 2 : 4;
    int64_t heads = 0, kv = 0, inner = 0;
    for (int64_t i = 0; i < count; i++) {
        const Block *b = some + i;
        if (b->heads * b->size > heads) heads = b->heads * b->size;
        if (b->kv_heads * b->size > kv) kv = b->kv_heads * b->size;
        if (b->inner > inner) inner = b->inner;
    }
    char *space = malloc(T * bytes * (2 * E + 2 * heads + 2 * kv + 2 * inner));
    if (!space) return NO_MEMORY;
    char *y = space, *more = y + T * E * bytes, *q = more + T * E * bytes, *other = q + T * heads * bytes;
    char *k = other + T * heads * bytes, *v = k + T * kv * bytes, *gate = v + T * kv * bytes, *up = gate + T * inner * bytes;
    int done = FINE;
#define TRY(call) if ((done = (call))) break
    for (int64_t i = 0; i < count; i++) {
        const Block *b = some + i;
        const Buffer *held = buffers + i;
        const int64_t wide = b->heads * b->size;
        const int kind = b->narrow ? NARROW : half;
        const void *read = i || !first ? y : first;
        const int64_t of = i || !first ? E : inputs;
        if (read == y) add_norm(x, i ? more : NULL, b->before, y, T, E, b->before_eps, half);
        if (taps && taps[i]) memcpy(taps[i], x, T * E * bytes);
        TRY(linear(read, b->query, b->query_bias, q, T, wide, of, kind, threads));
        char *asked = q, *seen = other;
        if (b->query_norm) {
            add_norm(q, NULL, b->query_norm, other, T * b->heads, b->size, b->query_norm_eps, half);
            asked = other;
            seen = q;
        }
        turn(asked, cos, sin, T, b->heads, b->size, half);
        TRY(entries(b, held, read, k, v, T, of, cos, sin, slots, half, threads));
        const Call call = {.keys = held->keys, .values = held->values, .query = asked, .out = seen,
                           .k_row = held->k_row, .k_slot = held->k_slot, .k_head = held->k_head,
                           .v_row = held->v_row, .v_slot = held->v_slot, .v_head = held->v_head,
                           .q_token = wide, .q_head = b->size, .o_token = wide, .o_head = b->size,
                           .heads = b->heads, .kv_heads = b->kv_heads, .size = b->size, .value_size = b->size,
                           .half = half, .scale = b->scale};
        TRY(attend(plans[i], &call, threads));
        TRY(linear(seen, b->out, b->out_bias, more, T, E, wide, kind, threads));
        add_norm(x, more, b->after, y, T, E, b->after_eps, half);
        TRY(linear(y, b->gate, b->gate_bias, gate, T, b->inner, E, kind, threads));
        TRY(linear(y, b->up, b->up_bias, up, T, b->inner, E, kind, threads));
        silu_mul(gate, up, T * b->inner, half);
        TRY(linear(gate, b->down, b->down_bias, more, T, E, b->inner, kind, threads));
    }
    if (done == FINE && count) {
        add_norm(x, more, some[0].after, y, T, E, some[0].after_eps, half); /* x += more */
        if (taps && taps[count]) memcpy(taps[count], x, T * E * bytes);
    }
    free(space);
    return done;
}

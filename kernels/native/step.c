/* One token of each row through whole models, from its embedding to its logits: the steps of a chain, each row by its own model. */

#include <stdlib.h>
#include <string.h>

#include "calls.h"

typedef struct { /* one model, and the rows that it reads; where steps differ, they lie one after another */
    const Block *blocks;
    const Buffer *buffers;
    const Plan *const *plans;
    const void *embedding, *norm, *head, *bias; /* [tokens, E], [E], [V, E], [V] or NULL */
    const float *cos, *sin;      /* [steps, T, size] */
    const int64_t *slots, *rows; /* [steps, T]; [T]: rows of `ids` and of `logits`, or NULL for 0 .. T - 1 */
    int64_t count, T, E, V, size, tokens;
    float eps;
} Reader;

static int reads(const Reader *r, int64_t at, const int64_t *ids, char *logits, int half, int threads) {
    const int64_t bytes = half ? 2 : 4, wide = r->E * bytes, each = r->V * bytes;
    char *x = malloc(2 * r->T * wide + (r->rows ? r->T * each : 0));
    if (!x) return NO_MEMORY;
    char *y = x + r->T * wide, *made = r->rows ? y + r->T * wide : logits;
    int done = FINE;
    for (int64_t t = 0; t < r->T && done == FINE; t++) {
        const int64_t id = ids[r->rows ? r->rows[t] : t];
        if (id < 0 || id >= r->tokens) done = NO_TOKEN;
        else memcpy(x + t * wide, (const char *)r->embedding + id * wide, wide);
    }
    Plan now[r->count];
    const Plan *plans[r->count];
    for (int64_t i = 0; i < r->count; i++) {
        now[i] = *r->plans[i];
        now[i].length += at * r->T;
        now[i].low += at * r->T;
        now[i].high += at * r->T;
        plans[i] = now + i;
    }
    const int64_t turned = at * r->T * r->size;
    if (done == FINE)
        done = blocks(r->blocks, r->buffers, plans, NULL, r->count, x, r->T, r->E, r->cos + turned, r->sin + turned,
                      r->slots + at * r->T, half, threads);
    if (done == FINE) {
        add_norm(x, NULL, r->norm, y, r->T, r->E, r->eps, half);
        done = linear(y, r->head, r->bias, made, r->T, r->V, r->E, half, threads);
    }
    if (done == FINE && r->rows)
        for (int64_t t = 0; t < r->T; t++) memcpy(logits + r->rows[t] * each, made + t * each, each);
    free(x);
    return done;
}

/* Step number `at`: ids [B]; logits [B, V], of which the rows of all readers are written. */
int step(const Reader *all, int64_t count, int64_t at, const int64_t *ids, void *logits, int half, int threads) {
    int done = FINE;
    for (int64_t i = 0; i < count && done == FINE; i++) done = reads(all + i, at, ids, logits, half, threads);
    return done;
}

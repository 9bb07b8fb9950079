/* Packed tokens through whole models, from their embeddings to their logits, each token by its own model. */

#include <stdlib.h>
#include <string.h>

#include "calls.h"

typedef struct { /* one model, and the T tokens that it reads */
    const Block *blocks;
    const Buffer *buffers;
    const Plan *const *plans;
    void *const *taps;                          /* as for blocks */
    const void *embedding, *norm, *head, *bias; /* [tokens, E], [E], [V, E], [V] or NULL */
    const float *cos, *sin;                     /* [T, size] */
    const int64_t *slots;                       /* [T] */
    const int64_t *from;                        /* [T]: which of the ids, or NULL for 0 .. T - 1 */
    const int64_t *keep, *rows;                 /* [kept]: tokens whose logits to compute, or NULL for all T; their rows, or NULL for 0 .. kept - 1 */
    int64_t count, T, kept, E, V, tokens;
    int64_t narrow; /* the head is as narrow() makes it */
    float eps;
} Reader;

static int reads(const Reader *r, const int64_t *ids, char *logits, int half, int threads) {
    const int64_t bytes = half ? 2 : 4, wide = r->E * bytes, each = r->V * bytes;
    char *x = malloc((r->T + 2 * r->kept) * wide + (r->rows ? r->kept * each : 0));
    if (!x) return NO_MEMORY;
    char *y = x + r->T * wide, *z = y + r->kept * wide, *made = r->rows ? z + r->kept * wide : logits;
    int done = FINE;
    for (int64_t t = 0; t < r->T && done == FINE; t++) {
        const int64_t id = ids[r->from ? r->from[t] : t];
        if (id < 0 || id >= r->tokens) done = NO_TOKEN;
        else memcpy(x + t * wide, (const char *)r->embedding + id * wide, wide);
    }
    if (done == FINE)
        done = blocks(r->blocks, r->buffers, r->plans, r->taps, r->count, NULL, r->E, x, r->T, r->E, r->cos, r->sin, r->slots, half,
                      threads);
    if (done == FINE && r->kept) {
        if (r->keep)
            for (int64_t i = 0; i < r->kept; i++) memcpy(y + i * wide, x + r->keep[i] * wide, wide);
        add_norm(r->keep ? y : x, NULL, r->norm, z, r->kept, r->E, r->eps, half);
        done = linear(z, r->head, r->bias, made, r->kept, r->V, r->E, r->narrow ? NARROW : half, threads);
        if (done == FINE && r->rows)
            for (int64_t i = 0; i < r->kept; i++) memcpy(logits + r->rows[i] * each, made + i * each, each);
    }
    free(x);
    return done;
}

/* ids of all readers; logits [.., V], of which the rows of all readers are written */
int step(const Reader *all, int64_t count, const int64_t *ids, void *logits, int half, int threads) {
    int done = FINE;
    for (int64_t i = 0; i < count && done == FINE; i++) done = reads(all + i, ids, logits, half, threads);
    return done;
}

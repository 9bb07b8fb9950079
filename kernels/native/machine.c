/* What the processor has, and what the compiler made of it. */

#include "tiles.h"

/* tiles(), for Python */
int units(void) { return tiles(); }

/* Whether oneDNN, PyTorch's library of products, has bfloat16 ones for this processor. */
int half_units(void) {
#if (defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)) || defined(__AVXNECONVERT__) || defined(__ARM_FEATURE_BF16)
    return 1;
#else
    return 0;
#endif
}

/* Whether kernels use more than one thread. */
int threaded(void) {
#ifdef _OPENMP
    return 1;
#else
    return 0;
#endif
}

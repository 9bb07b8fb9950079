/* Matrix units for bfloat16 (AMX): tiles of 16 rows of 64 bytes. `tiles()` says whether there are any, on processors that have them and
   where the system lets a process use them. Every thread sets its own up before it begins, and gives them back. */

#pragma once
#include <stdint.h>

#if defined(__AMX_BF16__) && defined(__AVX512F__) && defined(__AVX512BW__) && defined(__linux__) && !defined(NO_TILES)
#define TILES 1
#include <immintrin.h>

int tiles(void);

/* What was written before is there when tiles are loaded: compilers do not know that a load reads memory. */
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

#else
#define TILES 0
static inline int tiles(void) { return 0; }
#endif

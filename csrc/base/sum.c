/* Sums of memory: four lanes, which a processor computes side by side. */
#include "base/sum.h"

#include <string.h>

#define LANES 4
#define BLOCK (LANES * sizeof(uint64_t))

/* For each sum another word gives another one, and for each word another sum does. */
static uint64_t mix(uint64_t sum, uint64_t word)
{
    sum = (sum ^ word) * UINT64_C(0x9e3779b97f4a7c15);
    return sum << 31 | sum >> 33;
}

static void mix_block(uint64_t *lanes, const char *block)
{
    uint64_t words[LANES];

    memcpy(words, block, BLOCK);
    for (int i = 0; i < LANES; i++) {
        lanes[i] = mix(lanes[i], words[i]);
    }
}

uint64_t fc_sum_bytes(const void *data, size_t bytes)
{
    uint64_t lanes[LANES] = {1, 2, 3, 4};
    const char *at = data;
    char rest[BLOCK] = {0};
    uint64_t sum = bytes;

    for (size_t n = bytes / BLOCK; n > 0; n--) {
        mix_block(lanes, at);
        at += BLOCK;
    }
    if (bytes % BLOCK > 0) {
        memcpy(rest, at, bytes % BLOCK);
        mix_block(lanes, rest);
    }
    for (int i = 0; i < LANES; i++) {
        sum = mix(sum, lanes[i]);
    }
    return sum;
}

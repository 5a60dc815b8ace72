/* A group of N_RANKS, which who includes this defines: all the others say what this rank does. */
#ifndef ALIKE_RANKS_H
#define ALIKE_RANKS_H

#include "base/status.h"

#include <stddef.h>
#include <string.h>

static inline fc_status exchange(void *context, const char *what, const void *mine, size_t bytes,
                                 void *all_out)
{
    (void)context, (void)what;
    for (size_t r = 0; r < N_RANKS; r++) {
        memcpy((char *)all_out + r * bytes, mine, bytes);
    }
    return FC_OK;
}

static inline fc_status all_gather(void *context, void *recv, const void *send, size_t bytes)
{
    return exchange(context, "", send, bytes, recv);
}

#endif

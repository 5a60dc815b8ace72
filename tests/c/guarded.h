/* Memory behind whose end nothing can be read: a list that is read one entry too far ends the
 * program. */
#ifndef GUARDED_H
#define GUARDED_H

#include "check.h"

#include "base/alloc.h"

#include <sys/mman.h>

/* Zeros. */
static inline void *guarded_create(size_t bytes)
{
    const size_t room = fc_round_up(bytes, FC_PAGE);
    char *begin =
        mmap(NULL, room + FC_PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

    CHECK_OR_EXIT(begin != MAP_FAILED);
    CHECK_OR_EXIT(mprotect(begin + room, FC_PAGE, PROT_NONE) == 0);
    return begin + room - bytes;
}

static inline void guarded_destroy(void *memory, size_t bytes)
{
    const size_t room = fc_round_up(bytes, FC_PAGE);

    CHECK_OR_EXIT(munmap((char *)memory + bytes - room, room + FC_PAGE) == 0);
}

#endif

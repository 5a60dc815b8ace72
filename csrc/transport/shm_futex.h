/* Sleeping on a word that other processes change. Threading: multi. */
#ifndef FC_TRANSPORT_SHM_FUTEX_H
#define FC_TRANSPORT_SHM_FUTEX_H

#include "base/clock.h"

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

/* Until the word differs from `seen`, a wake, or the time is over. True: a signal ended it. */
static inline bool fc_futex_sleep(_Atomic uint32_t *word, uint32_t seen, int64_t timeout_ns)
{
    struct timespec timeout = {.tv_sec = (time_t)(timeout_ns / FC_NS_PER_S),
                               .tv_nsec = (long)(timeout_ns % FC_NS_PER_S)};

    /* Not FUTEX_PRIVATE: the sleepers are other processes. */
    return syscall(SYS_futex, word, FUTEX_WAIT, seen, &timeout, NULL, 0) != 0 && errno == EINTR;
}

static inline void fc_futex_wake_all(_Atomic uint32_t *word)
{
    (void)syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

#endif

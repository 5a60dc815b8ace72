/* CLOCK_MONOTONIC as one number. */
#include "base/clock.h"

#include <time.h>

int64_t fc_now_ns(void)
{
    struct timespec now;

    (void)clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * FC_NS_PER_S + now.tv_nsec;
}

int64_t fc_deadline_ns(int64_t timeout_ns)
{
    int64_t now = fc_now_ns();

    return timeout_ns > INT64_MAX - now ? INT64_MAX : now + timeout_ns;
}

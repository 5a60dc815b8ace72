/* Monotonic time in nanoseconds and deadlines. Threading: multi. */
#ifndef FC_BASE_CLOCK_H
#define FC_BASE_CLOCK_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define FC_NS_PER_US INT64_C(1000)
#define FC_NS_PER_MS INT64_C(1000000)
#define FC_NS_PER_S INT64_C(1000000000)

int64_t fc_now_ns(void);

/* now + timeout, without wrapping. */
int64_t fc_deadline_ns(int64_t timeout_ns);

#ifdef __cplusplus
}
#endif
#endif

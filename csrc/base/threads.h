/* The threads of this process, as the kernel sees them. Threading: multi. */
#ifndef FC_BASE_THREADS_H
#define FC_BASE_THREADS_H

#include <stdbool.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Whether a thread of that name runs, or would if it got a processor; it sleeps otherwise. Names
 * have up to 15 characters. */
bool fc_threads_any_runs(const char *name);

#ifdef __cplusplus
}
#endif
#endif

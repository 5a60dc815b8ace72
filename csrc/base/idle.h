/* Work that threads do while they wait for something else, a little at a time. Threading: multi. */
#ifndef FC_BASE_IDLE_H
#define FC_BASE_IDLE_H

#include <stdbool.h>

#ifdef __cplusplus
extern "C" {
#endif

/* From now on fc_idle_step calls `step`, one thread at a time, until it returns false: nothing is
 * left then. False: there is other work already. */
bool fc_idle_begin(bool (*step)(void *context), void *context);
/* Returns when that work is in no thread, and will not be again. */
void fc_idle_end(void *context);
/* Does a little of what there is; false: there was nothing, or another thread is at it. */
bool fc_idle_step(void);

#ifdef __cplusplus
}
#endif
#endif

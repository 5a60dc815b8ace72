/* The threads of this process, as the kernel sees them. Threading: multi. */
#ifndef FC_BASE_THREADS_H
#define FC_BASE_THREADS_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Whether a thread of that name runs, or would if it got a processor; it sleeps otherwise. Names
 * have up to 15 characters. */
bool fc_threads_any_runs(const char *name);

/* Starts a thread that no signal comes to: they are for the program's own. `name` may be NULL, and
 * a thread that ends must not have done so before this returns. `out` NULL: nobody joins it. 0, or
 * what errno would be. */
int fc_thread_start(const char *name, void *(*body)(void *arg), void *arg, pthread_t *out);

/* A condition whose deadlines are of fc_now_ns. */
void fc_condition_init(pthread_cond_t *out);

/* As pthread_cond_wait; false: the deadline has come. */
bool fc_condition_wait(pthread_cond_t *condition, pthread_mutex_t *lock, int64_t deadline_ns);

#ifdef __cplusplus
}
#endif
#endif

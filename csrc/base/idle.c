#include "base/idle.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>

static struct {
    pthread_mutex_t lock;
    _Atomic bool has_work; /* asked first, since there mostly is none */
    bool (*step)(void *context);
    void *context;
} idle = {.lock = PTHREAD_MUTEX_INITIALIZER};

/* With the lock held. */
static void clear(void)
{
    atomic_store_explicit(&idle.has_work, false, memory_order_relaxed);
    idle.step = NULL;
    idle.context = NULL;
}

bool fc_idle_begin(bool (*step)(void *context), void *context)
{
    bool is_free;

    /* Never waits: in a child made by fork a thread of its parent may have the lock for ever. Then
     * nothing begins there, and nothing is to end. */
    if (pthread_mutex_trylock(&idle.lock) != 0) {
        return false;
    }
    is_free = idle.step == NULL;
    if (is_free) {
        idle.step = step;
        idle.context = context;
        atomic_store_explicit(&idle.has_work, true, memory_order_relaxed);
    }
    (void)pthread_mutex_unlock(&idle.lock);
    return is_free;
}

void fc_idle_end(void *context)
{
    (void)pthread_mutex_lock(&idle.lock);
    if (idle.context == context) {
        clear();
    }
    (void)pthread_mutex_unlock(&idle.lock);
}

bool fc_idle_step(void)
{
    bool is_done;

    if (!atomic_load_explicit(&idle.has_work, memory_order_relaxed) ||
        pthread_mutex_trylock(&idle.lock) != 0) {
        return false;
    }
    is_done = idle.step != NULL && idle.step(idle.context);
    if (!is_done) {
        clear();
    }
    (void)pthread_mutex_unlock(&idle.lock);
    return is_done;
}

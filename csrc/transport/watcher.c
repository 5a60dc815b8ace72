/* The thread that tells peers where this process's program is, when they ask; and how it ended.
 *
 * One per process, from its first transport over shared memory on until the last is gone. It looks
 * a few times a second whether somebody has asked, and only then calls the host, which may take
 * long: nobody's lock is held meanwhile. A child made by fork has no such thread, and begins anew.
 */
#include "base/threads.h"
#include "transport/shm_futex.h"
#include "transport/shm_impl.h"

#include <pthread.h>
#include <string.h>

#define LOOK_NS (200 * FC_NS_PER_MS)
#define STOP_NS FC_NS_PER_S
#define STOP_SLICE_NS (FC_NS_PER_MS / 2)

static struct {
    pthread_mutex_t lock;
    fc_transport *first; /* linked by `next_watched` */
    bool is_running;
    bool is_stopped;
    bool is_fork_safe;
    _Atomic uint32_t bell; /* changes when the thread has to look at once */
} watcher = {.lock = PTHREAD_MUTEX_INITIALIZER};

static void begin_anew(void)
{
    watcher.lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
    watcher.first = NULL;
    watcher.is_running = false;
}

static fc_shm_rank *own_block(const fc_transport *t)
{
    return fc_shm_rank_of(t, t->rank);
}

/* The host's function if somebody has asked, else NULL. */
static bool (*find_asked(void))(fc_place *)
{
    bool (*tell)(fc_place *) = NULL;

    for (const fc_transport *t = watcher.first; t != NULL; t = t->shm->next_watched) {
        fc_shm_rank *own = own_block(t);
        uint32_t asked = atomic_load_explicit(&own->n_asked, memory_order_acquire);

        if (t->host.tell_place != NULL &&
            asked != atomic_load_explicit(&own->answer.answered, memory_order_relaxed)) {
            atomic_store_explicit(&own->answer.heard, asked, memory_order_release);
            tell = t->host.tell_place;
        }
    }
    return tell;
}

static void write_answer(fc_shm_answer *answer, uint32_t question, const fc_place *place)
{
    uint64_t words[FC_SHM_PLACE_WORDS];

    memcpy(words, place, sizeof(words));
    /* Words are released, so that who has read one of them sees the odd count. */
    atomic_fetch_add_explicit(&answer->n_writes, 1, memory_order_relaxed);
    for (size_t w = 0; w < FC_SHM_PLACE_WORDS; w++) {
        atomic_store_explicit(&answer->place[w], words[w], memory_order_release);
    }
    atomic_fetch_add_explicit(&answer->n_writes, 1, memory_order_release);
    atomic_store_explicit(&answer->answered, question, memory_order_release);
}

static void answer_all(const fc_place *place)
{
    for (const fc_transport *t = watcher.first; t != NULL; t = t->shm->next_watched) {
        fc_shm_answer *answer = &own_block(t)->answer;
        uint32_t heard = atomic_load_explicit(&answer->heard, memory_order_relaxed);

        if (heard != atomic_load_explicit(&answer->answered, memory_order_relaxed)) {
            write_answer(answer, heard, place);
        }
    }
}

static void *watch(void *arg)
{
    (void)arg;
    (void)pthread_mutex_lock(&watcher.lock);
    while (watcher.first != NULL && !watcher.is_stopped) {
        uint32_t bell = atomic_load(&watcher.bell);
        bool (*tell)(fc_place *) = find_asked();

        (void)pthread_mutex_unlock(&watcher.lock);
        if (tell != NULL) {
            fc_place place = {.group = 0};

            if (!tell(&place)) {
                place = (fc_place){.group = 0};
            }
            (void)pthread_mutex_lock(&watcher.lock);
            answer_all(&place);
            (void)pthread_mutex_unlock(&watcher.lock);
        }
        (void)fc_futex_sleep(&watcher.bell, bell, LOOK_NS);
        (void)pthread_mutex_lock(&watcher.lock);
    }
    watcher.is_running = false;
    (void)pthread_mutex_unlock(&watcher.lock);
    return NULL;
}

/* Without a thread nobody is told, and that is all. It wants the lock, which is held here. */
static void start(void)
{
    watcher.is_running = fc_thread_start(FC_WATCHER_NAME, watch, NULL, NULL) == 0;
}

void fc_watcher_add(fc_transport *transport)
{
    if (transport->n_ranks == 1) {
        return;
    }
    (void)pthread_mutex_lock(&watcher.lock);
    if (!watcher.is_fork_safe) {
        watcher.is_fork_safe = true;
        fc_process_reset_in_children(begin_anew);
    }
    transport->shm->next_watched = watcher.first;
    watcher.first = transport;
    if (transport->host.tell_place != NULL && !watcher.is_running && !watcher.is_stopped) {
        start();
    }
    (void)pthread_mutex_unlock(&watcher.lock);
}

static void ring(void)
{
    atomic_fetch_add(&watcher.bell, 1);
    fc_futex_wake_all(&watcher.bell);
}

void fc_watcher_remove(fc_transport *transport)
{
    fc_transport **at = &watcher.first;

    (void)pthread_mutex_lock(&watcher.lock);
    while (*at != NULL && *at != transport) {
        at = &(*at)->shm->next_watched;
    }
    if (*at != NULL) {
        *at = transport->shm->next_watched;
    }
    if (watcher.first == NULL && watcher.is_running) {
        ring();
    }
    (void)pthread_mutex_unlock(&watcher.lock);
}

static bool is_running(void)
{
    bool answer;

    (void)pthread_mutex_lock(&watcher.lock);
    answer = watcher.is_running;
    (void)pthread_mutex_unlock(&watcher.lock);
    return answer;
}

void fc_transport_tell_end(fc_end end)
{
    (void)pthread_mutex_lock(&watcher.lock);
    for (const fc_transport *t = watcher.first; t != NULL; t = t->shm->next_watched) {
        atomic_store_explicit(&own_block(t)->end, (uint32_t)end, memory_order_release);
    }
    (void)pthread_mutex_unlock(&watcher.lock);
}

static bool is_at_end(const fc_transport *t, int peer)
{
    const fc_shm_rank *block = fc_shm_rank_of(t, peer);

    return peer != t->rank &&
           (atomic_load_explicit(&block->end, memory_order_acquire) != FC_END_UNTOLD ||
            !fc_process_is_alive(&t->shm->peers[peer]));
}

bool fc_transport_find_end(char out[FC_END_BYTES])
{
    bool is_found = false;

    (void)pthread_mutex_lock(&watcher.lock);
    for (const fc_transport *t = watcher.first; t != NULL && !is_found; t = t->shm->next_watched) {
        for (int r = 0; r < t->n_ranks && !is_found; r++) {
            is_found = is_at_end(t, r);
            if (is_found) {
                fc_shm_tell_end(t, r, out, FC_END_BYTES);
            }
        }
    }
    (void)pthread_mutex_unlock(&watcher.lock);
    return is_found;
}

void fc_transport_stop_telling(void)
{
    const struct timespec pause = {.tv_nsec = STOP_SLICE_NS};
    int64_t deadline_ns = fc_deadline_ns(STOP_NS);

    (void)pthread_mutex_lock(&watcher.lock);
    watcher.is_stopped = true;
    ring();
    (void)pthread_mutex_unlock(&watcher.lock);
    while (is_running() && fc_now_ns() < deadline_ns) {
        (void)nanosleep(&pause, NULL);
    }
}

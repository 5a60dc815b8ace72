/* The control segment of a shared memory transport: layout, and what its files share.
 *
 * One block per rank, one writer per cache line. Text in it is for people: it is cut to its field
 * and may be torn when read while its owner writes.
 */
#ifndef FC_TRANSPORT_SHM_IMPL_H
#define FC_TRANSPORT_SHM_IMPL_H

#include "base/alloc.h"
#include "transport/process.h"
#include "transport/transport_impl.h"

#include <assert.h>
#include <stdalign.h>
#include <stdatomic.h>

#define FC_SHM_MAIL_BYTES 1024
#define FC_SHM_OP_BYTES 24
#define FC_SHM_UNIT_BYTES 84

/* The last wait of a rank. */
typedef struct fc_shm_activity {
    _Atomic uint64_t sequence;
    _Atomic uint32_t is_waiting;
    _Atomic int32_t peer; /* whom it waits for, or did */
    char op[FC_SHM_OP_BYTES];
    char unit[FC_SHM_UNIT_BYTES];
} fc_shm_activity;

/* Of a rank that sleeps in waits: the number of the last, and how often it found nothing there. */
typedef struct fc_shm_patience {
    _Atomic uint32_t n_waits;
    _Atomic uint32_t n_looks;
} fc_shm_patience;

#define FC_SHM_PLACE_WORDS (sizeof(fc_place) / sizeof(uint64_t))

/* What a rank's watcher has told; questions are numbered. */
typedef struct fc_shm_answer {
    _Atomic uint32_t heard;    /* the last question that the watcher has seen */
    _Atomic uint32_t answered; /* the one that `place` answers */
    _Atomic uint32_t n_writes; /* odd while `place` is written */
    _Atomic uint64_t place[FC_SHM_PLACE_WORDS];
} fc_shm_answer;

typedef struct fc_shm_rank {
    /* Written by the owner. The bell is a futex: it changes with every publication. */
    alignas(FC_CACHE_LINE) _Atomic uint32_t bell;
    _Atomic uint32_t is_closed;
    _Atomic uint32_t end; /* of the owner's program: fc_end */
    /* Written by peers that sleep on the bell, and by those that ask where the owner is. */
    alignas(FC_CACHE_LINE) _Atomic uint32_t n_sleepers;
    _Atomic uint32_t n_asked;
    /* Written by the owner. */
    alignas(FC_CACHE_LINE) fc_shm_activity activity;
    alignas(FC_CACHE_LINE) fc_shm_patience patience;
    alignas(FC_CACHE_LINE) fc_shm_answer answer;
    alignas(FC_CACHE_LINE) fc_word mail_sequence;
    char mail[2][FC_SHM_MAIL_BYTES];
} fc_shm_rank;

enum {
    FC_SHM_ABORT_NONE,
    FC_SHM_ABORT_WRITING,
    FC_SHM_ABORT_WRITTEN
};

typedef struct fc_shm_control {
    /* Written once by the rank that moves `abort_state` away from NONE. */
    alignas(FC_CACHE_LINE) _Atomic uint32_t abort_state;
    int32_t abort_rank;
    int32_t abort_status;
    char abort_text[FC_MESSAGE_BYTES];
    fc_shm_rank ranks[];
} fc_shm_control;

static_assert(ATOMIC_INT_LOCK_FREE == 2 && ATOMIC_LLONG_LOCK_FREE == 2, "shared between processes");
static_assert(sizeof(fc_place) % sizeof(uint64_t) == 0, "copied by words");
static_assert(sizeof(fc_shm_activity) <= FC_CACHE_LINE, "one line");
static_assert(sizeof(fc_shm_rank) % FC_CACHE_LINE == 0, "lines of neighbours stay apart");
static_assert(offsetof(fc_shm_control, ranks) % FC_CACHE_LINE == 0, "blocks are aligned");

struct fc_shm {
    /* Constant after create. */
    size_t control_bytes;
    bool may_spin; /* as many cpus as ranks: nobody is kept from running */

    /* Owned. */
    fc_shm_control *control;
    fc_process *peers; /* n_ranks */
    char *mail_in;     /* n_ranks boxes: what fc_transport_map_region hears from its peers */

    /* Serialized like the calls. */
    uint64_t mail_sequence;

    fc_transport *next_watched; /* of the watcher */
};

static inline fc_shm_rank *fc_shm_rank_of(const fc_transport *t, int rank)
{
    return &t->shm->control->ranks[rank];
}

/* ---- where peers are ---- */

#define FC_WATCHER_NAME "fsdp_c watcher" /* of its thread, for ps and debuggers */

/* Lets the watcher answer the peers of a transport, or no more. */
void fc_watcher_add(fc_transport *transport);
void fc_watcher_remove(fc_transport *transport);

/* What a rank that waits has learnt about its peer's place; zeroed at the start of the wait. */
typedef struct fc_shm_inquiry {
    uint32_t question; /* 0: none so far */
    bool is_answered;  /* the last question */
    int64_t at_ns;     /* when it was put; when its answer was read */
    int64_t stuck_ns;  /* since when the peer is in a collective that waits for this rank; 0: not */
    fc_place place;    /* the last answer; zero if none */
    int64_t mutual_ns; /* since when the peer waits for this rank, in `wait`; 0: it does not */
    uint32_t wait;     /* the peer's, and its looks at `mutual_ns` */
    uint32_t looks;
} fc_shm_inquiry;

/* Puts questions and reads answers; now and then while a wait lasts, with the host's lock. True:
 * the peer sits in a collective that this rank has not called, so that neither can go on. */
bool fc_shm_inquire(const fc_transport *transport, int peer, fc_shm_inquiry *inquiry,
                    int64_t waited_ns);

/* Whether the peer waits for this rank, which waits: it has looked since and found nothing, and
 * what it looks for this rank would have to publish. True is final unless this rank's wait is over.
 */
bool fc_shm_waits_for_us(const fc_transport *transport, int peer, fc_shm_inquiry *inquiry);

/* "; it is at train.py:41 in main", or why that is not known; nothing if it was not asked. */
void fc_shm_tell_place(const fc_transport *transport, int peer, const fc_shm_inquiry *inquiry,
                       char *out, size_t bytes);

/* "rank 1 (pid 4711) ended its script", of one that is gone or about to be. */
void fc_shm_tell_end(const fc_transport *transport, int peer, char *out, size_t bytes);

/* All ranks give `bytes` (at most FC_SHM_MAIL_BYTES) and get everybody's in rank order, through the
 * control segment: waits end like every wait. A failure breaks the transport. */
FC_MUST_CHECK fc_status fc_shm_exchange(fc_transport *transport, const char *what, const void *mine,
                                        size_t bytes, void *all_out);

/* How a rank's local step of a collective set-up went. Travels between processes. */
typedef struct fc_shm_outcome {
    int32_t status;
    int32_t rank; /* global, for people */
    char text[FC_MESSAGE_BYTES / 4];
} fc_shm_outcome;

/* The outcome of `status`, with this thread's last message if it is a failure. */
void fc_shm_outcome_set(fc_shm_outcome *outcome, const fc_transport *transport, fc_status status);

/* FC_OK if all went well, else the first failure in rank order: the same error on all ranks. The
 * outcomes lie `stride` bytes apart. */
FC_MUST_CHECK fc_status fc_shm_outcome_agree(const fc_transport *transport, const char *what,
                                             const void *outcomes, size_t stride);

#endif

/* The engine of the stand-in for NCCL: moves bytes between processes or threads over host memory.
 *
 * A communicator is a piece of shared memory with a ring of slots per rank. A collective is copied
 * into a slot when there is room, and done when all ranks have theirs there; both happen only
 * while somebody asks (ncclCommGetAsyncError, fc_stand_in_is_idle), so that nothing runs beside the
 * test. A rank that dies stops all others, which NCCL does not report either.
 *
 * Threading: callers hold `lock`, unless it is said otherwise.
 */
#ifndef FC_TESTS_NCCL_ENGINE_H
#define FC_TESTS_NCCL_ENGINE_H

#include "base/dtype.h"
#include "nccl_stand_in.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>

#define RANKS 8
#define SLOTS 4
#define SLOT_BYTES (256 << 10)
#define SPLITS 16

typedef struct deed {
    uint64_t bytes; /* that this rank gives */
    int kind, type;
} deed;

typedef struct slot {
    deed what;
    char data[SLOT_BYTES];
} slot;

typedef struct split_entry {
    _Atomic int state; /* 1: color and key are there; 2: and the new memory */
    int color, key;
    int pid, fd;
} split_entry;

typedef struct world_rank {
    _Atomic uint64_t posted, consumed;
    _Atomic int has_joined, is_final;
    split_entry splits[SPLITS];
    slot slots[SLOTS];
} world_rank;

typedef struct world {
    world_rank ranks[RANKS];
} world;

enum {
    GATHER,
    SCATTER,
    REDUCE,
    SCATTER_MEANS,
    REDUCE_MEANS
};

typedef struct work {
    struct work *next;
    deed what;
    const void *from;
    void *to;
    void *stream;
    uint64_t sequence;
    uint64_t serial; /* in the process */
    size_t count;
} work;

typedef struct comm {
    struct comm *next; /* all of this process, so that stale handles are known */
    world *shared;
    int rank, n_ranks;
    int polls_left;
    bool is_ready, is_final, is_dead;
    int error;
    int n_callers; /* threads that are in a call */
    int n_splits;
    void **split_out; /* a split is under way */
    split_entry *split_mine;
    bool split_blocks;
    work *first;
    uint64_t n_posted; /* collectives so far */
} comm;

extern stand_in control;
extern pthread_mutex_t lock;
extern uint64_t n_enqueued; /* collectives of this process so far: the newest serial */
extern comm *comms;         /* of this process, the newest first */

/* A breach of NCCL's rules; the first is kept. Gives FC_NCCL_INVALID_USAGE. Without the lock, too.
 */
int fault(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* ---- communicators ---- */

/* Memory of a new one as a descriptor that stays open: others come to it through /proc. */
int make_world(void);
world *open_world(int pid, int number);
comm *make_comm(world *shared, int rank, int n_ranks);
comm *find(void *handle); /* NULL and a fault: there is none, or it was ended */
void bury(comm *c);
/* Around a call, of which a communicator has one at a time; they take the lock. */
void enter(void *handle, const char *call);
void leave(void *handle);
/* Ranks of a communicator, without its rules; takes the lock. */
size_t ranks_of(void *handle);

/* ---- work ---- */

fc_dtype dtype_of(int type); /* FC_DTYPE_COUNT: there is no such type */
size_t bytes_of(size_t count, int type);
/* Copied to the end of the communicator's work. */
int append(comm *c, const work *what);
/* Whether all that was enqueued up to a serial is done, after going on with all of it. */
bool is_done(uint64_t serial);

/* As far as it gets now. */
void go_on(comm *c);
/* Whether calls of any kind would break the rules; and what callers are told. */
bool is_busy(const comm *c);
bool is_in_progress(const comm *c);
/* What a call that does not block answers. */
int answer(comm *c);

#endif

/* What the files of the simulator share. */
#ifndef FC_DEVICE_SIM_SIM_PRIVATE_H
#define FC_DEVICE_SIM_SIM_PRIVATE_H

#include "device/sim/sim.h"

#include <pthread.h>

#define FC_SIM_FAULTS_KEPT 8
#define FC_SIM_HOST 0 /* the host's place among a rank's streams */

typedef struct fc_sim_rank fc_sim_rank;
typedef struct fc_sim_op fc_sim_op;

/* How much of each stream of a rank is known to have come before. */
typedef struct fc_sim_clock {
    uint32_t seen[FC_SIM_STREAMS];
} fc_sim_clock;

/* One record of an event: waits hold it, the event may be recorded again. */
typedef struct fc_sim_mark {
    fc_sim_clock clock;
    bool is_done;
    int n_holders;
} fc_sim_mark;

struct fc_event {
    fc_sim_mark *mark; /* NULL until recorded */
};

typedef enum fc_sim_kind {
    FC_SIM_KERNEL,
    FC_SIM_RECORD,
    FC_SIM_WAIT,
    FC_SIM_COLLECTIVE
} fc_sim_kind;

/* The k-th collective of a communicator, over all ranks. */
typedef struct fc_sim_meeting {
    const char *kind; /* "all-gather", ... */
    fc_label label;   /* of the rank that came first */
    int first_rank;
    size_t bytes;
    fc_dtype dtype;
    int n_arrived, n_left;
    bool is_done;
    void *to[FC_SIM_RANKS];
    const void *from[FC_SIM_RANKS];
    struct fc_sim_meeting *next;
} fc_sim_meeting;

struct fc_device_comm {
    fc_sim *sim;
    const char *name;
    int ranks[FC_SIM_RANKS];
    int n_ranks;
    uint64_t n_joined[FC_SIM_RANKS]; /* by place in the comm */
    uint64_t n_done;
    uint64_t n_dropped;    /* meetings that all ranks have left */
    fc_sim_meeting *first; /* owned; meeting number n_dropped */
    struct fc_device_comm *next;
};

struct fc_sim_op {
    fc_sim_kind kind;
    fc_label label;
    fc_sim_op *next;
    fc_sim_mark *mark; /* RECORD, WAIT: held */
    fc_sim_kernel kernel;
    void *args; /* owned */
    fc_device_comm *comm;
    fc_sim_meeting *meeting;
    uint64_t meeting_number;
    bool has_arrived;
};

struct fc_stream {
    fc_sim_rank *device;
    const char *name;
    int index;
    unsigned laziness; /* it is passed over this many times out of 8 */
    fc_sim_clock clock;
    fc_sim_op *first, *last;
};

typedef struct fc_sim_access {
    size_t begin, end; /* in the block */
    int stream;
    uint32_t tick;
    bool writes;
    fc_label label;
} fc_sim_access;

/* Memory of one rank; kept after a free, for the next request of its size. */
typedef struct fc_sim_block {
    char *memory;
    size_t bytes;
    fc_label label;
    fc_stream *stream; /* the host for pinned memory */
    bool is_live;
    fc_sim_access *accesses; /* owned; those that later ones do not stand for */
    size_t n_accesses, capacity;
} fc_sim_block;

struct fc_sim_rank {
    fc_device base;
    fc_sim *sim;
    int rank;
    fc_stream *streams[FC_SIM_STREAMS]; /* owned; the first is the host */
    int n_streams;
    fc_sim_block **blocks; /* owned, by address */
    size_t n_blocks, capacity;
    size_t bytes, peak_bytes;
    int n_collectives;   /* that have begun */
    int64_t allocs_left; /* until one fails; negative: none does */
    bool is_finished;
    const fc_sim_mark *waits_for; /* the host does; NULL: runs */
    fc_status status;
};

/* A copy of a label's text: reports come when its owner may be gone. */
typedef struct fc_sim_text {
    struct fc_sim_text *next;
    char text[];
} fc_sim_text;

struct fc_sim {
    int n_ranks;
    fc_sim_text *texts; /* owned */
    fc_sim_rank devices[FC_SIM_RANKS];
    fc_device_comm *comms; /* owned */
    fc_moves *moves;       /* owned; all that were ever made */
    uint64_t random;
    int n_at_once;      /* collectives of a rank; 0: any number */
    unsigned haste;     /* of 8 calls, how many let the devices work */
    unsigned jumpiness; /* of 32 calls, how many change the rank */
    int n_faults;
    char faults[FC_SIM_FAULTS_KEPT][512];
    bool is_stuck;
    /* Ranks in turn. */
    pthread_mutex_t lock;
    pthread_cond_t turned;
    int turn;
    fc_sim_body body;
    void *arg;
};

extern const fc_device_ops fc_sim_ops;
void fc_sim_moves_free(fc_moves *moves);

/* ---- sim_memory.c ---- */

/* The same label, valid as long as the simulation. */
fc_label fc_sim_keep(fc_device *device, fc_label label);
/* Checks one access of the stream's newest operation against all before it and keeps it. */
void fc_sim_touch(fc_stream *stream, fc_label label, fc_sim_range range);
/* A block of `bytes` that belongs to `stream`, reused where it can be. */
FC_MUST_CHECK fc_status fc_sim_block_take(fc_stream *stream, fc_label label, size_t bytes,
                                          void **out);
/* Its stream may hand it out again; the bytes stay until the stream gets there. */
void fc_sim_block_give(fc_sim_block *block);
void fc_sim_poison(void *memory, size_t bytes);
fc_sim_block *fc_sim_block_at(const fc_sim_rank *device, const void *at);
void fc_sim_blocks_destroy(fc_sim_rank *device);
/* More faults than fit are only counted. */
void fc_sim_report(fc_sim *sim, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* ---- sim_queue.c ---- */

void fc_sim_clock_join(fc_sim_clock *clock, const fc_sim_clock *other);
/* The stream's next operation begins: it comes after all that the host has waited for. */
void fc_sim_tick(fc_stream *stream);
/* At the end of the stream's queue; takes over `op`. */
void fc_sim_enqueue(fc_stream *stream, fc_sim_op *op);
void fc_sim_op_destroy(fc_sim_op *op);
void fc_sim_mark_release(fc_sim_mark *mark);
FC_MUST_CHECK fc_status fc_sim_op_create(fc_sim_kind kind, fc_label label, fc_sim_op **out);
FC_MUST_CHECK fc_status fc_sim_kernel_enqueue(fc_stream *stream, fc_label label,
                                              fc_sim_kernel kernel, const void *args,
                                              size_t args_bytes);
/* Runs one operation of any stream; false if none can run. */
bool fc_sim_step(fc_sim *sim);
uint64_t fc_sim_draw(fc_sim *sim, uint64_t below);

/* ---- sim_collective.c ---- */

/* True if the operation at the head of a stream got further. */
bool fc_sim_meet(fc_sim_rank *device, fc_sim_op *op, bool *is_over);
void fc_sim_comm_destroy(fc_device_comm *comm);
FC_MUST_CHECK fc_status fc_sim_all_gather(fc_device *device, fc_device_comm *comm,
                                          fc_stream *stream, fc_label label, void *buffer,
                                          size_t part_bytes);
FC_MUST_CHECK fc_status fc_sim_all_gather_each(fc_device *device, fc_device_comm *comm,
                                               fc_stream *stream, fc_label label,
                                               const fc_gather *gathers, size_t n_gathers);
FC_MUST_CHECK fc_status fc_sim_reduce_scatter(fc_device *device, fc_device_comm *comm,
                                              fc_stream *stream, fc_label label, void *to,
                                              const void *from, size_t numel, fc_dtype dtype);
FC_MUST_CHECK fc_status fc_sim_all_reduce(fc_device *device, fc_device_comm *comm,
                                          fc_stream *stream, fc_label label, void *buffer,
                                          size_t numel, fc_dtype dtype);

/* ---- sim_run.c ---- */

/* Lets devices and other ranks work, or not. */
void fc_sim_pause(fc_sim_rank *device);
/* The host of a rank waits. */
FC_MUST_CHECK fc_status fc_sim_await(fc_sim_rank *device, const fc_sim_mark *mark);

#endif

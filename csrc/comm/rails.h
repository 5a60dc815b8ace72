/* Collectives of ranks on several hosts: shared memory inside of a host, rails between hosts.
 *
 * [Note: rails] What travels between two hosts travels once. Rank i of a host talks to rank i of
 * the others: these two are a rail. Where hosts have different numbers of ranks, rank r is served
 * on another host by the rank there whose place on its host is that of r modulo their number: it
 * receives for its host what r gathers, and sends to r its host's sums. Both sides know all pairs.
 *
 * L ranks on each of H hosts, F bytes in the gathered or unreduced buffer. A rank sends:
 *   all_gather, reduce_scatter   F / (H L) to each of H - 1 ranks; an all_gather of up to 16 KiB a
 *                                host: one rank F / H to one of another host, the others nothing
 *   all_reduce                   both; up to a few KiB: all of it to each of H - 1 ranks
 *   broadcast                    the root: all of it to a rank of each other host
 *
 * Each rank says in a *frame* of fixed size which collective it is in, before what it sends: ranks
 * that differ get FC_ERR_MISMATCH, and nothing of another size is received. What is small travels
 * in the frame itself.
 *
 * Sums are added in the order of ranks on a host, rounded to the type that travels, then in the
 * order of hosts: the same bits in each run. Threading: serialized.
 */
#ifndef FC_COMM_RAILS_H
#define FC_COMM_RAILS_H

#include "base/status.h"
#include "transport/transport.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Messages to and from ranks of other hosts. Those between two ranks arrive in order, and all of
 * them whether or not somebody waits. */
typedef struct fc_rail_ops {
    void *context;
    /* Begin; the memory is lent until that message has been awaited. A message is received by who
     * asks for the same `key` and size: others may wait for ever. */
    fc_status (*send)(void *context, int rank, uint32_t key, const void *data, size_t bytes);
    fc_status (*receive)(void *context, int rank, uint32_t key, void *data, size_t bytes);
    /* Wait, up to a deadline, for the oldest message to or from the rank that nobody has awaited.
     */
    fc_status (*await_sent)(void *context, int rank);
    fc_status (*await_received)(void *context, int rank);
    /* From any thread: the wait of another one, and those that follow, end with an error. */
    void (*interrupt)(void *context);
    /* Gives up what was begun; the memory is not touched any more. */
    void (*drop)(void *context);
    void (*release)(void *context);
} fc_rail_ops;

typedef struct fc_rails_config {
    int rank, n_ranks;
    const int *global_ranks;  /* n_ranks, for messages */
    const int *hosts;         /* n_ranks: where each lives, numbered from 0 by their first ranks */
    const char *const *names; /* of the hosts */
    fc_transport *local;      /* mapped, of this host's ranks in their order; NULL: it has one */
    fc_rail_ops rails;
    fc_message_ops group; /* the process group's own: makes all_to_all */
} fc_rails_config;

/* Collective on each host. `local` is borrowed until the operation `release`, which releases rails
 * and group; so does a failure. A failure of a collective ends this host's others, too. */
FC_MUST_CHECK fc_status fc_rails_create(const fc_rails_config *config, fc_message_ops *out);

/* What this rank has sent to a host; bytes without frames. */
typedef struct fc_rails_sent {
    uint64_t bytes, messages;
} fc_rails_sent;

/* 0 for operations that are no rails. */
int fc_rails_n_hosts(const fc_message_ops *ops);
/* Of rails: to the ranks of one host since they were created. */
fc_rails_sent fc_rails_count(const fc_message_ops *rails, int host);

/* A rank of the group, on another host, and since when this one waits for it. */
typedef struct fc_rails_wait {
    int rank;
    int64_t since_ns; /* fc_now_ns */
} fc_rails_wait;

/* False: it waits for none; also of operations that are no rails. From any thread. */
bool fc_rails_waits(const fc_message_ops *ops, fc_rails_wait *out);
/* What has been found out about a rank of the group, while this one waits for it: for those who
 * look at this process from outside. By one thread at a time, whichever it is. */
void fc_rails_tell(const fc_message_ops *ops, int rank, const char *text);
/* [Note: left phases] A rank that leaves a phase alone, by an exception, does not come to its
 * peers' next collective. Phases are counted when all ranks agree that they begin, and when one is
 * left, so that ranks that all raise alike count alike. This host's others see in shared memory
 * which phase it left; other hosts are told by who looks for signs of life, and see it in the frame
 * of its next collective if there is one. */
typedef struct fc_rails_failure {
    uint64_t phase; /* the last one that a rank left; 0: none; UINT64_MAX: its rails are broken */
    uint64_t after; /* collectives of its that came to an end before */
} fc_rails_failure;

/* Of this rank; from any thread. */
fc_rails_failure fc_rails_failed(const fc_message_ops *ops);
/* Of another rank: if this one waits for it in that phase, the wait ends as if interrupted. From
 * any thread. */
void fc_rails_hear(const fc_message_ops *ops, int rank, fc_rails_failure failure);

/* What this rank waits for on rails, now or next, fails with `text` as the cause, and so do this
 * host's other ranks. From any thread. */
void fc_rails_interrupt(const fc_message_ops *ops, const char *text);

#ifdef __cplusplus
}
#endif
#endif

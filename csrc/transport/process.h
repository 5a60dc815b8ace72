/* Which process this is, and whether another one still lives.
 *
 * Threading: multi, fc_process_open and fc_process_close serialized per object.
 */
#ifndef FC_TRANSPORT_PROCESS_H
#define FC_TRANSPORT_PROCESS_H

#include "base/status.h"

#include <stdbool.h>
#include <stdint.h>

/* Told to peers; the start time keeps a reused pid apart from the process that had it before. */
typedef struct fc_process_id {
    int32_t pid;
    uint32_t pid_namespace; /* inode number; 0 if unknown */
    uint64_t start_ticks;
} fc_process_id;

/* A process that is watched. */
typedef struct fc_process {
    fc_process_id id;
    int pidfd; /* owned; -1: watched through /proc */
} fc_process;

/* Differs between a process and its forked children; no system call. */
unsigned fc_process_generation(void);

FC_MUST_CHECK fc_status fc_process_self(fc_process_id *out);

/* FC_ERR_UNSUPPORTED when the process cannot be seen from here. Close is idempotent. */
FC_MUST_CHECK fc_status fc_process_open(const fc_process_id *id, fc_process *out);
void fc_process_close(fc_process *process);

/* What failing to open a peer's file means: no descriptors left is an error, all else that memory
 * cannot be shared with it. */
fc_status fc_open_status(int code);

bool fc_process_is_alive(const fc_process *process);
bool fc_process_is_stopped(const fc_process *process); /* by SIGSTOP, or by a debugger */

/* Of a process that is gone and whose program did not say that it ended. */
#define FC_PROCESS_LOST "was killed, or left by os._exit"

/* Calls `reset` in every child made by fork from now on, for state that its parent's threads may
 * have left half way. */
void fc_process_reset_in_children(void (*reset)(void));

#endif

/* Takes snapshots: a thread copies memory into a file while its owner computes.
 *
 * Threading: calls of one copier serialized, but that fc_copier_commit and fc_copier_finish may
 * come beside each other; its thread works beside them. A child made by fork has no such thread:
 * its calls do nothing, and it may only destroy the copier.
 */
#ifndef FC_SNAPSHOT_COPIER_H
#define FC_SNAPSHOT_COPIER_H

#include "snapshot/snapshot.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct fc_copier fc_copier;

/* A snapshot to take. */
typedef struct fc_snapshot_job {
    void *file; /* mapped; as long as page, data and index; left alone until it is finished */
    uint64_t sequence, step;
    const fc_snapshot_piece *pieces; /* placed; `pieces` and `index` are used by the call alone */
    size_t n_pieces;
    const void *index;
    size_t index_bytes;
    /* NULL: memory is there. Else called once, by any thread, before a piece that is not `is_now`
     * is read: returns when a device has copied it there, or false: then the snapshot does not
     * count. */
    bool (*await)(void *owner);
    /* Called by the copier's thread when all is copied, and ever more seldom until the owner calls
     * fc_copier_commit or fc_copier_finish. It may not call the copier. NULL: nobody is asked. */
    void (*ask_for_commit)(void *owner);
    /* Whether the memory of pieces is as it was when the copy began. Asked once, in
     * fc_copier_commit or fc_copier_finish, when all is copied; where it is not, the snapshot does
     * not count. */
    bool (*is_unchanged)(void *owner);
    void *owner;
} fc_snapshot_job;

FC_MUST_CHECK fc_status fc_copier_create(fc_copier **out);
void fc_copier_destroy(fc_copier *copier); /* finishes what has begun; NULL is fine */

/* The file holds no snapshot from now on. Copies the index and the pieces of `is_now`; the others
 * may be read until fc_copier_finish. FC_ERR_STATE: a copy is under way. */
FC_MUST_CHECK fc_status fc_copier_start(fc_copier *copier, const fc_snapshot_job *job);

/* The snapshot counts from now on, if all is copied. Early, to lose less if the process is killed:
 * fc_copier_finish does the same. Only where nothing is just being written: a write is known by its
 * version, which comes when it is over. */
void fc_copier_commit(fc_copier *copier);

/* Returns when memory is read no more, and helps until then; whether the last snapshot counts. */
bool fc_copier_finish(fc_copier *copier);

#ifdef __cplusplus
}
#endif
#endif

/* The first page of a file, and what the copier leaves there. */
#ifndef FC_SNAPSHOT_SNAPSHOT_PRIVATE_H
#define FC_SNAPSHOT_SNAPSHOT_PRIVATE_H

#include "snapshot/snapshot.h"
#include "snapshot/sums.h"

/* How many rows so many bytes fill. */
static inline size_t fc_snapshot_rows(size_t bytes)
{
    return (bytes + FC_SUM_ROW - 1) / FC_SUM_ROW;
}

/* Where data begin. */
static inline char *fc_snapshot_data(void *file)
{
    return (char *)file + FC_SNAPSHOT_PAGE;
}

/* The snapshot with these facts and sums counts from now on; all of it is written. */
void fc_snapshot_commit(void *file, const fc_snapshot_facts *facts, const fc_sums *data,
                        const fc_sums *index);

#endif

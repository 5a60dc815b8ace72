/* Copies rows of 64 bytes and adds them up on the way, so that a sum costs no second look at them.
 *
 * Sums of parts add up to the sum of the whole, in any order: in each of eight lanes the words, and
 * the words times the number of rows from theirs to the end.
 */
#ifndef FC_SNAPSHOT_SUMS_H
#define FC_SNAPSHOT_SUMS_H

#include <stddef.h>
#include <stdint.h>

#define FC_SUM_ROW ((size_t)64)
#define FC_SUM_LANES 8

typedef struct fc_sums {
    uint64_t plain[FC_SUM_LANES];
    uint64_t weighted[FC_SUM_LANES];
} fc_sums;

/* Copies `bytes`, the last row filled up with zeros, past the caches; `dst` is aligned to a row, or
 * NULL: then nothing is copied. The rows are those from `first` on of `n_rows` in all. */
void fc_sums_copy(fc_sums *sums, void *dst, const void *src, size_t bytes, size_t first,
                  size_t n_rows);

/* One number of them all, not 0. */
uint64_t fc_sums_mixed(const fc_sums *sums);

#endif

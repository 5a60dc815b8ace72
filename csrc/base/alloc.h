/* Memory of the core: zeroed small objects, and page-backed buffers for bulk data, each counted for
 * what it is for.
 *
 * The caller owns what it gets. Threading: multi. In test builds fc_alloc_fail_after() makes the
 * n-th request fail, so that every clean-up path can be walked.
 */
#ifndef FC_BASE_ALLOC_H
#define FC_BASE_ALLOC_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define FC_CACHE_LINE 128 /* two lines: the adjacent-line prefetcher pairs them */
#define FC_ALIGN 64       /* a vector register, a cache line */
#define FC_PAGE 4096

/* Zeroed; NULL when out of memory or when `count * bytes` overflows. */
void *fc_alloc(size_t count, size_t bytes);
void fc_free(void *memory);

/* What bytes are for. */
typedef enum fc_purpose {
    FC_FOR_OBJECTS,   /* of fc_alloc */
    FC_FOR_SLOTS,     /* private copies of unsharded units */
    FC_FOR_GRADIENTS, /* gradients of shards */
    FC_FOR_MESSAGES,  /* what another process group's collectives may overwrite */
    FC_FOR_SHARED,    /* mappings that all ranks of a host have in common */
    FC_PURPOSE_COUNT
} fc_purpose;

/* Private pages aligned to FC_PAGE, large pages asked for where they help; NULL on failure. */
void *fc_pages_alloc(fc_purpose purpose, size_t bytes);
void fc_pages_free(fc_purpose purpose, void *memory, size_t bytes);

/* For memory that comes from elsewhere; negative when it is given back. */
void fc_account_add(fc_purpose purpose, int64_t bytes);
/* Bytes of this process for the purpose now. */
int64_t fc_account_bytes(fc_purpose purpose);

/* Requests served since start minus frees: 0 means that nothing leaked. */
int64_t fc_alloc_live(void);

/* Test aid: the n-th request from now fails (0: the next one); negative switches it off. */
void fc_alloc_fail_after(int64_t n);

static inline size_t fc_round_up(size_t value, size_t step)
{
    return (value + step - 1) / step * step;
}

#ifdef __cplusplus
}
#endif
#endif

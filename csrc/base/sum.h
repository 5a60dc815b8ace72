/* A number for what memory holds, to find out whether it was written. */
#ifndef FC_BASE_SUM_H
#define FC_BASE_SUM_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Another one as soon as a single word of 8 bytes is another; as good as surely if several are. No
 * cipher: nobody is kept from finding memory of the same sum. */
uint64_t fc_sum_bytes(const void *data, size_t bytes);

#ifdef __cplusplus
}
#endif
#endif

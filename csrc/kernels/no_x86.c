/* The vector tables on machines other than x86-64: there are none. */
#include "kernels/kern_tables.h"

const fc_kern_table *fc_kern_table_avx2(void)
{
    return NULL;
}

const fc_kern_table *fc_kern_table_avx512(void)
{
    return NULL;
}

const fc_kern_table *fc_kern_table_avx512_bf16(void)
{
    return NULL;
}

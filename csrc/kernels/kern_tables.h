/* The kernel tables behind kernels.h, one per instruction set.
 *
 * Each vector table is in a file of its own, compiled with that instruction set's flags; on other
 * machines no_x86.c answers instead. The returned tables are static. Threading: multi.
 */
#ifndef FC_KERNELS_KERN_TABLES_H
#define FC_KERNELS_KERN_TABLES_H

#include "kernels/kernels.h"

/* Plain C for every slot: what the other tables are held to, bit by bit. */
const fc_kern_table *fc_kern_table_ref(void);

/* NULL where the CPU or the operating system does not support the instructions. */
const fc_kern_table *fc_kern_table_avx2(void);
const fc_kern_table *fc_kern_table_avx512(void);
const fc_kern_table *fc_kern_table_avx512_bf16(void);

#endif

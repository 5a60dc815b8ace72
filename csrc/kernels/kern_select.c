/* Finds the tables that this CPU runs, once when the library is loaded, and picks the best. */
#include "kernels/kern_tables.h"

#include <stdatomic.h>
#include <string.h>

#define MAX_TABLES 4

/* Written by the constructor only, before any other thread can be here; better tables come later.
 */
static const fc_kern_table *tables[MAX_TABLES];
static size_t n_tables;

/* Tables are constant, so that nothing but the pointer itself needs ordering. */
static _Atomic(const fc_kern_table *) current;

static void add_table(const fc_kern_table *table)
{
    if (table != NULL) {
        tables[n_tables++] = table;
    }
}

__attribute__((constructor)) static void find_tables(void)
{
    add_table(fc_kern_table_ref());
    add_table(fc_kern_table_avx2());
    add_table(fc_kern_table_avx512());
    add_table(fc_kern_table_avx512_bf16());
    atomic_store_explicit(&current, tables[n_tables - 1], memory_order_relaxed);
}

const fc_kern_table *fc_kern(void)
{
    return atomic_load_explicit(&current, memory_order_relaxed);
}

size_t fc_kern_tables(const fc_kern_table *const **tables_out)
{
    *tables_out = tables;
    return n_tables;
}

bool fc_kern_use(const char *name)
{
    for (size_t i = 0; i < n_tables; i++) {
        if (strcmp(tables[i]->name, name) == 0) {
            atomic_store_explicit(&current, tables[i], memory_order_relaxed);
            return true;
        }
    }
    return false;
}

#define DEFINE_COPY(bytes)                                                                         \
    static void copy_##bytes(void *dst, const void *src, size_t numel)                             \
    {                                                                                              \
        fc_kern()->copy(dst, src, (bytes) * numel);                                                \
    }

DEFINE_COPY(1)
DEFINE_COPY(2)
DEFINE_COPY(4)
DEFINE_COPY(8)
DEFINE_COPY(16)

static fc_cast_fn copy_of_size(size_t bytes)
{
    switch (bytes) {
    case 1:
        return copy_1;
    case 2:
        return copy_2;
    case 4:
        return copy_4;
    case 8:
        return copy_8;
    default:
        return copy_16;
    }
}

fc_cast_fn fc_kern_cast(fc_dtype from, fc_dtype to)
{
    if (fc_dtype_is_float(from) && fc_dtype_is_float(to)) {
        return fc_kern()->cast[from][to];
    }
    return from == to ? copy_of_size(fc_dtype_bytes(from)) : NULL;
}

fc_reduce_fn fc_kern_reduce(fc_dtype src, fc_dtype dst)
{
    if (fc_dtype_is_float(src) && fc_dtype_is_float(dst)) {
        return fc_kern()->reduce[src][dst];
    }
    return src == dst ? fc_kern()->reduce_int[src] : NULL;
}

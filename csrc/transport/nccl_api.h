/* NCCL's interface as far as it is used: own declarations, since the library is found at run time.
 *
 * Handles are pointers and enums are ints, which is what they are in NCCL's ABI. Functions give an
 * ncclResult_t, the constants FC_NCCL_* below. Versions are those whose nccl.h first declares a
 * function; in NCCL's own coding, 2.27.3 is 22703.
 */
#ifndef FC_TRANSPORT_NCCL_API_H
#define FC_TRANSPORT_NCCL_API_H

#include <limits.h>
#include <stddef.h>

#define FC_NCCL_ID_BYTES 128

typedef struct fc_nccl_id {
    char bytes[FC_NCCL_ID_BYTES];
} fc_nccl_id;

/* ncclResult_t */
enum {
    FC_NCCL_SUCCESS = 0,
    FC_NCCL_CUDA_ERROR = 1,
    FC_NCCL_SYSTEM_ERROR = 2,
    FC_NCCL_INTERNAL_ERROR = 3,
    FC_NCCL_INVALID_ARGUMENT = 4,
    FC_NCCL_INVALID_USAGE = 5,
    FC_NCCL_REMOTE_ERROR = 6,
    FC_NCCL_IN_PROGRESS = 7
};

/* ncclDataType_t */
enum {
    FC_NCCL_INT8 = 0,
    FC_NCCL_UINT8 = 1,
    FC_NCCL_INT32 = 2,
    FC_NCCL_INT64 = 4,
    FC_NCCL_FLOAT16 = 6,
    FC_NCCL_FLOAT32 = 7,
    FC_NCCL_FLOAT64 = 8,
    FC_NCCL_BFLOAT16 = 9
};

/* ncclRedOp_t */
#define FC_NCCL_SUM 0
#define FC_NCCL_AVG 4 /* 2.10 */
#define FC_NCCL_NO_COLOR (-1)
#define FC_NCCL_MAGIC 0xcafebeefU
#define FC_NCCL_UNDEFINED INT_MIN

#define FC_NCCL_OLDEST 21400     /* communicators that do not block */
#define FC_NCCL_NEWEST 22809     /* whose config follows */
#define FC_NCCL_MANY_RANKS 23003 /* NCCL_MULTI_RANK_GPU_ENABLE */

/* ncclConfig_t up to 2.28.9. It only grows, and the library reads `size` bytes, whatever `version`
 * says: padding behind the last field that a version has would be its next field, with a value. */
typedef struct fc_nccl_config {
    size_t size;
    unsigned magic;
    unsigned version;
    int blocking; /* 2.14 */
    int cga_cluster_size;
    int min_ctas;
    int max_ctas;
    const char *net_name; /* 2.17 */
    int split_share;      /* 2.18 */
    int traffic_class;
    const char *comm_name;
    int collnet_enable;
    int cta_policy;
    int shrink_share; /* 2.27 */
    int nvls_ctas;    /* 2.28 */
    int channels_per_net_peer;
    int nvlink_centric_sched;
} fc_nccl_config;

/* Bytes of a config that ends with a field. */
#define FC_NCCL_CONFIG_TO(field)                                                                   \
    (offsetof(fc_nccl_config, field) + sizeof(((fc_nccl_config *)0)->field))

/* X(name in the table, name in the library, version, parameters): without them nothing works. */
#define FC_NCCL_NEEDED(X)                                                                          \
    X(get_version, "ncclGetVersion", 20307, (int *version))                                        \
    X(get_unique_id, "ncclGetUniqueId", 20000, (fc_nccl_id * id))                                  \
    X(comm_init, "ncclCommInitRankConfig", 21400,                                                  \
      (void **comm, int n_ranks, fc_nccl_id id, int rank, fc_nccl_config *config))                 \
    X(comm_async_error, "ncclCommGetAsyncError", 20400, (void *comm, int *error))                  \
    X(comm_finalize, "ncclCommFinalize", 21400, (void *comm))                                      \
    X(comm_destroy, "ncclCommDestroy", 20000, (void *comm))                                        \
    X(comm_abort, "ncclCommAbort", 20400, (void *comm))                                            \
    X(group_start, "ncclGroupStart", 20000, (void))                                                \
    X(group_end, "ncclGroupEnd", 20000, (void))                                                    \
    X(all_gather, "ncclAllGather", 20000,                                                          \
      (const void *from, void *to, size_t count, int type, void *comm, void *stream))              \
    X(reduce_scatter, "ncclReduceScatter", 20000,                                                  \
      (const void *from, void *to, size_t count, int type, int op, void *comm, void *stream))      \
    X(all_reduce, "ncclAllReduce", 20000,                                                          \
      (const void *from, void *to, size_t count, int type, int op, void *comm, void *stream))

/* X(name in the table, name in the library, version, parameters): NULL where they are missing. */
#define FC_NCCL_OPTIONAL(X)                                                                        \
    X(comm_split, "ncclCommSplit", 21800,                                                          \
      (void *comm, int color, int key, void **out, fc_nccl_config *config))

/* The functions of one library. */
typedef struct fc_nccl_functions {
    const char *(*error_text)(int error);
    const char *(*last_error)(void *comm); /* 2.13 */
#define FC_NCCL_MEMBER(name, symbol, version, parameters) int(*name) parameters;
    FC_NCCL_NEEDED(FC_NCCL_MEMBER)
    FC_NCCL_OPTIONAL(FC_NCCL_MEMBER)
#undef FC_NCCL_MEMBER
} fc_nccl_functions;

#endif

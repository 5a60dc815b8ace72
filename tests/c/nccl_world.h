/* Ranks of a test over the stand-in for NCCL: a group each, and the library behind it. */
#ifndef FC_TESTS_NCCL_WORLD_H
#define FC_TESTS_NCCL_WORLD_H

#include "library_path.h"
#include "nccl_stand_in.h"
#include "ranks.h"

#include "base/alloc.h"
#include "transport/nccl.h"
#include "transport/nccl_api.h"

#include <dlfcn.h>

#define TIMEOUT_NS (20 * FC_NS_PER_S)
#define SHORT_NS (300 * FC_NS_PER_MS)
#define PART 96
#define MUST(call) CHECK_MSG((call) == FC_OK, "%s", fc_last_message())

typedef struct setting {
    int polls;
    bool is_one, is_old;
    int version; /* 0: the library's own */
} setting;

/* A rank of a test: its group and the library behind it. */
typedef struct world {
    ranks_host host;
    fc_nccl_options options;
    stand_in *control;
    bool (*is_idle)(void *stream);
    fc_nccl_group *group;
    int64_t live;
} world;

static int stream_memory[2];

static inline fc_stream *stream_of(int number)
{
    return (fc_stream *)(void *)&stream_memory[number];
}

/* The control of the library, which it may open for the first time. */
static inline stand_in *open_stand_in(world *w, const char *name, char *path)
{
    void *library, *symbol;
    stand_in *(*get)(void);

    library_path(name, path);
    library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    CHECK_OR_EXIT(library != NULL);
    symbol = dlsym(library, "fc_stand_in_control");
    memcpy(&get, &symbol, sizeof(get));
    symbol = dlsym(library, "fc_stand_in_is_idle");
    if (w != NULL) {
        memcpy(&w->is_idle, &symbol, sizeof(w->is_idle));
    }
    return get();
}

static inline void start(world *w, const setting *s)
{
    char path[PATH_MAX];

    memset(w, 0, sizeof(*w));
    w->control =
        open_stand_in(w, s->is_old ? "libnccl_stand_in_old.so" : "libnccl_stand_in.so", path);
    w->control->polls = s->polls;
    w->control->version = s->version != 0 ? s->version : s->is_old ? 21602 : 23007;
    MUST(fc_nccl_open(path, false, &w->options.nccl));
    w->options.is_one = s->is_one;
    w->live = fc_alloc_live();
}

static inline fc_status create(world *w, int rank, int n_ranks, int64_t timeout_ns)
{
    fc_transport_config config = ranks_config(&w->host, 0, rank, n_ranks, timeout_ns);

    return fc_nccl_group_create(&config, &w->options, &w->group);
}

/* Nothing may be left, and no rule of NCCL broken. */
static inline void finish(world *w)
{
    fc_nccl_group_destroy(w->group);
    w->group = NULL;
    CHECK_EQ(w->control->n_live, 0);
    CHECK_EQ(fc_alloc_live(), w->live);
    CHECK_EQ(count_segments(), 0);
    CHECK_STR(w->control->fault, "");
}

typedef struct idle_args {
    const world *w;
    int stream;
} idle_args;

static inline bool is_idle(void *arg)
{
    const idle_args *a = arg;

    return a->w->is_idle(stream_of(a->stream));
}

static inline fc_status wait_idle(world *w, fc_nccl_group *group, int stream)
{
    const fc_wait_info info = {.op = "synchronize", .unit = "layers.0"};
    idle_args args = {w, stream};

    return fc_nccl_wait(&group, 1, is_idle, &args, &info);
}

static const fc_label layer = {"layers.0", "test", 0};

#endif

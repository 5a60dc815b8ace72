/* Random programs of units on devices, and what they give when computed plainly on whole tensors.
 *
 * A program is drawn from a seed: ranks, units, steps, forwards and how gradients are accumulated.
 */
#ifndef FC_TESTS_SCHEDULE_MODEL_H
#define FC_TESTS_SCHEDULE_MODEL_H

#include "check.h"
#include "device/device.h"
#include "engine/schedule.h"
#include "kernels/kernels.h"

#include <stdbool.h>

#define RANKS 16
#define UNITS 5
#define PARAMS 3
#define ELEMENTS 384 /* of a parameter at most */
#define STEPS 3
#define MICROS 3
#define CALLS 8
#define STREAMS 7 /* of a device */

#define MUST(call) CHECK_EQ(call, FC_OK)

/* ---- a random program, the same on all ranks ---- */

typedef struct value {
    char bytes[ELEMENTS * 8];
} value;

typedef enum reshard_kind {
    RESHARD_NEVER,
    RESHARD_TO_ALL,
    RESHARD_TO_FEW
} reshard_kind;

typedef struct unit_model {
    char name[16];
    fc_param params[PARAMS]; /* the given fields */
    size_t n_params;
    bool gives_types;       /* of gradients; otherwise they are of type `compute` */
    fc_dtype given[PARAMS]; /* the types */
    bool is_frozen, is_offloaded, is_direct;
    bool may_reside;         /* one rank's shards lie as in the unsharded buffer */
    bool is_made;            /* its even parameters' shards are, for each gather */
    bool is_resident[STEPS]; /* and are used where they lie */
    bool is_peeked_at;       /* hooks read reduced gradients at once */
    reshard_kind reshard;
    double pre_divisor, divisor;
    bool has_list[2];
    int list[2][2]; /* two units to prefetch, in forward and in backward */
    /* What a plain computation gives. */
    value start[PARAMS];         /* original type */
    value judged[STEPS][PARAMS]; /* compute type, what an evaluation sees */
    value seen[STEPS][PARAMS];   /* compute type, what training sees */
    value grads[STEPS][PARAMS];  /* gradient type, after its last reduction */
    bool is_stepped[STEPS];
    value last[PARAMS]; /* original type */
} unit_model;

typedef struct micro_model {
    int calls[CALLS]; /* units in the order of forwards; the first one encloses the others */
    int n_calls;
    bool is_used[UNITS]; /* its gradients are given */
    fc_schedule_sync sync;
    bool is_last;
    /* Before the forward, or between it and the backward, another stream unshards one of its units.
     */
    bool is_visited_first, is_visited;
    int visited;
    bool leaves_sharded;
} micro_model;

typedef struct step_model {
    bool has_eval, gives_event;
    int ends_eval; /* 0: nobody says so, 1: as a backward, 2: as a forward alone */
    bool halves;   /* after the evaluation somebody halves all shards */
    micro_model micros[MICROS];
    int n_micros;
} step_model;

/* Which units are gathered straight into their parameters. */
typedef enum direct_units {
    DIRECT_SOME,
    DIRECT_ALL, /* none of them reshards to few, which would stage it */
    DIRECT_NONE
} direct_units;

typedef struct program {
    uint64_t random;
    direct_units direct;
    int n_shards, n_replicas, n_few;
    unit_model units[UNITS];
    int n_units;
    step_model steps[STEPS];
    int n_steps;
    size_t n_reduce_inputs, max_gathers;
    uint64_t without;
    int64_t fail_at; /* which allocation fails on each rank; negative: none */
    bool has_failed;
    bool may_fail;     /* the test looks at the faults itself */
    fc_status ended;   /* how it did */
    bool steps_beside; /* the optimizer has a stream of its own */
    bool shares_comm;  /* reductions use the communicator of gathers */
    bool moves_sums;   /* which they do from the second step on */
    bool turns_around; /* the last rank calls its units in another order */
    int n_at_once;     /* collectives on a device; 0: any number */
    fc_status (*wrap)(fc_device *simulated, fc_device **out); /* NULL: units use it as it is */
    void (*unwrap)(fc_device *device);
    size_t peak_bytes[RANKS];
    fc_device_comm *gather[RANKS], *reduce[RANKS], *replicas[RANKS], *few[RANKS]; /* by rank */
    fc_stream *streams[RANKS][STREAMS];
    _Atomic int n_wrong;
    void *shards[RANKS][UNITS][PARAMS];
} program;

static uint64_t mix(uint64_t x)
{
    x += UINT64_C(0x9e3779b97f4a7c15);
    x = (x ^ (x >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    x = (x ^ (x >> 27)) * UINT64_C(0x94d049bb133111eb);
    return x ^ (x >> 31);
}

static uint64_t draw(program *p, uint64_t below)
{
    return mix(p->random++) % below;
}

static inline size_t numel_of(const fc_param *p)
{
    return p->outer * p->rows * p->inner;
}

/* float64 is the rarest. */
static inline fc_dtype make_type(program *p)
{
    static const fc_dtype types[] = {FC_F32, FC_F32, FC_BF16, FC_BF16, FC_F16, FC_F16, FC_F64};

    return types[draw(p, sizeof(types) / sizeof(types[0]))];
}

/* What a parameter is of beside its size. */
static inline fc_param make_types(program *p, bool may_reside)
{
    fc_dtype compute = make_type(p);
    fc_dtype orig = may_reside ? compute : draw(p, 4) == 0 ? FC_BF16 : FC_F32;
    fc_dtype reduce = draw(p, 2) == 0 ? FC_F32 : draw(p, 4) == 0 ? FC_F64 : compute;

    return (fc_param){
        .orig = orig, .compute = compute, .reduce = reduce, .grad = orig, .has_grad = true};
}

/* Mostly in all steps or in none. */
static inline void make_residence(program *p, unit_model *u)
{
    bool is_resident = draw(p, 4) != 0;
    int step;

    for (step = 0; u->may_reside && step < STEPS; step++) {
        is_resident ^= draw(p, 4) == 0;
        u->is_resident[step] = is_resident;
    }
}

static inline void make_unit(program *p, int index)
{
    unit_model *u = &p->units[index];
    bool may_reside = p->n_shards == 1 && draw(p, 2) == 0;
    fc_param types = make_types(p, may_reside);
    bool is_mixed = draw(p, 3) == 0;
    size_t i, j;

    (void)snprintf(u->name, sizeof(u->name), "unit%d", index);
    u->n_params = 1 + draw(p, PARAMS);
    u->is_frozen = draw(p, 5) == 0;
    u->gives_types = draw(p, 3) == 0;
    u->may_reside = may_reside;
    u->is_offloaded = !may_reside && draw(p, 4) == 0;
    u->is_peeked_at = draw(p, 3) == 0;
    u->reshard = (reshard_kind)draw(p, may_reside ? RESHARD_TO_FEW : 3);
    u->pre_divisor = draw(p, 3) == 0 ? 2 : 1;
    u->divisor = draw(p, 3) == 0 ? 3 : (double)(p->n_shards * p->n_replicas);
    u->is_direct = draw(p, 2) == 0;
    if (p->direct != DIRECT_SOME) {
        u->is_direct = p->direct == DIRECT_ALL;
    }
    if (p->direct == DIRECT_ALL && u->reshard == RESHARD_TO_FEW) {
        u->reshard = RESHARD_TO_ALL;
    }
    for (i = 0; i < u->n_params; i++) {
        bool is_frozen = u->is_frozen || (i > 0 && draw(p, 4) == 0);
        size_t outer = 1 + draw(p, 2), rows = 1 + draw(p, 7), inner = 1 + draw(p, 6);

        u->params[i] = is_mixed ? make_types(p, may_reside) : types;
        u->given[i] = make_type(p);
        u->params[i].outer = u->is_direct ? 1 : outer;
        u->params[i].rows = u->is_direct ? (rows / 2 + 1) * (size_t)p->n_shards : rows;
        u->params[i].inner = inner;
        u->params[i].trainable = !is_frozen;
        for (j = 0; j < numel_of(&u->params[i]); j++) {
            float x = (float)(int)draw(p, 64) - 32;

            fc_kern_cast(FC_F32, u->params[i].orig)(
                u->start[i].bytes + j * fc_dtype_bytes(u->params[i].orig), &x, 1);
        }
    }
    for (i = 0; i < 2; i++) {
        u->has_list[i] = draw(p, 3) == 0;
        for (j = 0; j < 2; j++) {
            u->list[i][j] = (int)draw(p, (uint64_t)p->n_units);
        }
    }
    make_residence(p, u);
    u->is_made = !u->may_reside && (!u->is_direct || p->n_shards == 1) && draw(p, 3) == 0;
    for (i = 0; u->is_made && i < u->n_params; i += 2) {
        u->params[i].is_made = true;
    }
}

static inline void make_micro(program *p, micro_model *m, bool is_newest)
{
    int i;

    m->n_calls = 2 + (int)draw(p, CALLS - 2);
    for (i = 1; i < m->n_calls; i++) {
        m->calls[i] = p->n_units > 1 ? 1 + (int)draw(p, (uint64_t)p->n_units - 1) : 0;
    }
    if (p->n_units == 1) {
        m->n_calls = 1;
    }
    for (i = 0; i < p->n_units; i++) {
        m->is_used[i] = draw(p, 6) != 0;
    }
    m->sync = is_newest ? FC_SYNC_ALL : (fc_schedule_sync)draw(p, 3);
    m->is_last = is_newest || draw(p, 2) == 0;
    m->is_visited_first = draw(p, 4) == 0;
    m->is_visited = draw(p, 3) == 0;
    m->visited = m->calls[draw(p, (uint64_t)m->n_calls)];
    m->leaves_sharded = draw(p, 2) == 0;
}

/* Ranks of a group of shards, and how many such groups there are. */
typedef struct shape {
    int n_shards, n_replicas;
} shape;

static inline void make_program_among(program *p, uint64_t seed, direct_units direct,
                                      const shape *shapes, size_t n_shapes)
{
    shape drawn;
    int i, j;

    memset(p, 0, sizeof(*p));
    p->fail_at = -1;
    p->direct = direct;
    p->random = mix(seed);
    drawn = shapes[draw(p, n_shapes)];
    p->n_shards = drawn.n_shards;
    p->n_replicas = drawn.n_replicas;
    p->n_few = p->n_shards >= 4 && p->n_shards % 2 == 0 ? p->n_shards / 2 : 1;
    p->n_units = 1 + (int)draw(p, UNITS);
    p->n_reduce_inputs = draw(p, 4);
    p->max_gathers = draw(p, 4);
    p->moves_sums = draw(p, 3) == 0;
    p->steps_beside = draw(p, 2) == 0;
    for (i = 0; i < p->n_units; i++) {
        make_unit(p, i);
    }
    p->n_steps = 1 + (int)draw(p, STEPS);
    for (i = 0; i < p->n_steps; i++) {
        step_model *s = &p->steps[i];

        s->has_eval = draw(p, 3) == 0;
        s->ends_eval = (int)draw(p, 3);
        s->halves = s->has_eval && s->ends_eval > 0 && draw(p, 2) == 0;
        s->gives_event = draw(p, 2) == 0;
        s->n_micros = 1 + (int)draw(p, MICROS);
        for (j = 0; j < s->n_micros; j++) {
            make_micro(p, &s->micros[j], j == s->n_micros - 1);
        }
    }
}

static inline void make_program_of(program *p, uint64_t seed, direct_units direct)
{
    static const shape shapes[] = {{1, 1}, {1, 1}, {1, 1}, {2, 1}, {3, 1},
                                   {4, 1}, {2, 2}, {1, 2}, {2, 2}};

    make_program_among(p, seed, direct, shapes, sizeof(shapes) / sizeof(shapes[0]));
}

static inline void make_program(program *p, uint64_t seed)
{
    make_program_of(p, seed, DIRECT_SOME);
}

/* ---- gradients ---- */

typedef struct grad_key {
    int step, micro, call, rank, unit, param;
} grad_key;

static inline fc_dtype type_of_gradient(const unit_model *u, int param)
{
    return u->gives_types ? u->given[param] : u->params[param].compute;
}

/* Every rank gives a gradient to the first parameter, and to most others. */
static inline bool has_gradient(const unit_model *u, const grad_key *k)
{
    const fc_param *p = &u->params[k->param];
    uint64_t x = mix((uint64_t)(k->step * 7 + k->micro * 5 + k->rank * 3 + k->param));

    return p->trainable && (k->param == 0 || x % 5 != 0);
}

static inline void write_gradient(const unit_model *u, const grad_key *k, void *to)
{
    const fc_param *p = &u->params[k->param];
    fc_dtype type = type_of_gradient(u, k->param);
    uint64_t seed = mix(
        (uint64_t)(((k->step * 8 + k->micro) * 16 + k->call) * 128 + k->rank * 8 + k->unit) * 8 +
        (uint64_t)k->param);
    size_t j;

    for (j = 0; j < numel_of(p); j++) {
        float x = (float)(int)(mix(seed + j) % 255) / 8 - 16;

        fc_kern_cast(FC_F32, type)((char *)to + j * fc_dtype_bytes(type), &x, 1);
    }
}

/* ---- the plain computation, on whole tensors ---- */

static inline void add(fc_dtype from, fc_dtype to, value *sum, const value *x, size_t numel,
                       double divisor, bool accumulate)
{
    const void *source = x->bytes;

    if (divisor == 1 && !accumulate) {
        fc_kern_cast(from, to)(sum->bytes, x->bytes, numel);
    } else {
        fc_kern_reduce(from, to)(sum->bytes, &source, 1, numel, divisor, accumulate);
    }
}

static inline void halve(fc_dtype dtype, void *at, size_t numel)
{
    value old;
    const void *from = old.bytes;

    memcpy(old.bytes, at, numel * fc_dtype_bytes(dtype));
    fc_kern_reduce(dtype, dtype)(at, &from, 1, numel, 2, false);
}

/* Sums over ranks, each of them held or not. */
typedef struct sums {
    value staged[RANKS][PARAMS];
    value partial[RANKS][PARAMS]; /* by replica */
    bool is_held, is_partial, is_reduced;
} sums;

static inline void stage_plainly(const program *p, const unit_model *u, sums *s, grad_key k)
{
    value grad;
    int i;

    for (k.rank = 0; k.rank < p->n_shards * p->n_replicas; k.rank++) {
        for (i = 0; i < (int)u->n_params; i++) {
            const fc_param *q = &u->params[i];

            k.param = i;
            CHECK_OR_EXIT(numel_of(q) <= ELEMENTS);
            if (has_gradient(u, &k)) {
                write_gradient(u, &k, grad.bytes);
                add(type_of_gradient(u, i), q->reduce, &s->staged[k.rank][i], &grad, numel_of(q),
                    u->pre_divisor, s->is_held);
            } else if (!s->is_held) {
                memset(&s->staged[k.rank][i], 0, sizeof(value));
            }
        }
    }
    s->is_held = true;
}

static inline void sum_ranks(const fc_param *q, value *to, const void *const *from, int n)
{
    fc_kern_reduce(q->reduce, q->reduce)(to->bytes, from, (size_t)n, numel_of(q), 1.0, false);
}

static inline void reduce_plainly(const program *p, unit_model *u, sums *s, int step,
                                  bool is_partial)
{
    const void *from[RANKS];
    value own[RANKS], sum;
    size_t i;
    int replica, r;

    for (i = 0; i < u->n_params; i++) {
        const fc_param *q = &u->params[i];

        for (replica = 0; replica < p->n_replicas; replica++) {
            for (r = 0; r < p->n_shards; r++) {
                from[r] = &s->staged[replica * p->n_shards + r][i];
            }
            if (!s->is_held) {
                own[replica] = s->partial[replica][i];
            } else {
                sum_ranks(q, &own[replica], from, p->n_shards);
                if (s->is_partial) {
                    add(q->reduce, q->reduce, &own[replica], &s->partial[replica][i], numel_of(q),
                        1, true);
                }
            }
            s->partial[replica][i] = own[replica];
        }
        if (!is_partial) {
            for (r = 0; r < p->n_replicas; r++) {
                from[r] = &own[r];
            }
            sum = own[0];
            if (p->n_replicas > 1) {
                sum_ranks(q, &sum, from, p->n_replicas);
            }
            add(q->reduce, q->grad, &u->grads[step][i], &sum, numel_of(q), u->divisor,
                s->is_reduced);
        }
    }
    s->is_held = false;
    s->is_partial = is_partial;
    s->is_reduced = s->is_reduced || !is_partial;
}

static inline void post_backward_plainly(const program *p, unit_model *u, sums *s, grad_key k,
                                         const micro_model *m, bool is_called)
{
    bool is_partial = m->sync == FC_SYNC_SCATTER && p->n_replicas > 1;

    if (is_called && m->is_used[k.unit] && u->params[0].trainable) {
        stage_plainly(p, u, s, k);
    }
    if (m->sync == FC_SYNC_NONE || (!s->is_held && (is_partial || !s->is_partial))) {
        return;
    }
    reduce_plainly(p, u, s, k.step, is_partial);
}

static inline bool is_called(const micro_model *m, int unit)
{
    int i;

    for (i = 0; i < m->n_calls; i++) {
        if (m->calls[i] == unit) {
            return true;
        }
    }
    return false;
}

static inline void train_plainly(program *p)
{
    static sums all[UNITS];
    int step, micro, call, unit;
    size_t i;

    memset(all, 0, sizeof(all));
    for (unit = 0; unit < p->n_units; unit++) {
        memcpy(p->units[unit].last, p->units[unit].start, sizeof(p->units[unit].last));
    }
    for (step = 0; step < p->n_steps; step++) {
        for (unit = 0; unit < p->n_units; unit++) {
            unit_model *u = &p->units[unit];

            for (i = 0; i < u->n_params; i++) {
                const fc_param *q = &u->params[i];

                add(q->orig, q->compute, &u->judged[step][i], &u->last[i], numel_of(q), 1, false);
                if (p->steps[step].halves) {
                    halve(q->orig, u->last[i].bytes, numel_of(q));
                }
                add(q->orig, q->compute, &u->seen[step][i], &u->last[i], numel_of(q), 1, false);
            }
        }
        for (micro = 0; micro < p->steps[step].n_micros; micro++) {
            const micro_model *m = &p->steps[step].micros[micro];

            for (call = m->n_calls - 1; call >= 0; call--) {
                unit = m->calls[call];
                post_backward_plainly(p, &p->units[unit], &all[unit],
                                      (grad_key){step, micro, call, 0, unit, 0}, m, true);
            }
            for (unit = 0; unit < p->n_units; unit++) {
                if (!is_called(m, unit)) {
                    post_backward_plainly(p, &p->units[unit], &all[unit],
                                          (grad_key){step, micro, 0, 0, unit, 0}, m, false);
                }
            }
        }
        for (unit = 0; unit < p->n_units; unit++) {
            unit_model *u = &p->units[unit];

            u->is_stepped[step] = all[unit].is_reduced;
            for (i = 0; all[unit].is_reduced && i < u->n_params; i++) {
                if (u->params[i].trainable) {
                    add(u->params[i].grad, u->params[i].orig, &u->last[i], &u->grads[step][i],
                        numel_of(&u->params[i]), -64, true);
                }
            }
            all[unit].is_reduced = false;
        }
    }
}

#endif

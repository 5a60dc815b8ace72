/* Runs a random program on simulated devices and compares all it sees with the plain computation.
 */
#ifndef FC_TESTS_SCHEDULE_WORLD_H
#define FC_TESTS_SCHEDULE_WORLD_H

#include "base/alloc.h"
#include "device/sim/sim.h"
#include "schedule_model.h"

typedef struct device_unit {
    fc_schedule_unit *unit;
    fc_param params[PARAMS];
    fc_layout layout;
    const void *shards[PARAMS];
    const void *given[PARAMS]; /* to the schedule: shards, or what is made of them */
    void *made[PARAMS];
    struct worker *worker;
    void *resident; /* what they lie in, as in the unsharded buffer; NULL: each for itself */
    void *out;      /* reduced gradients; NULL: none yet */
} device_unit;

typedef struct worker {
    program *p;
    fc_device *device;
    const fc_device_ops *ops;
    int rank;
    fc_stream *compute, *copy_in, *gather, *reduce, *all_reduce;
    fc_stream *step; /* the optimizer's, which may be compute's */
    fc_schedule *schedule;
    fc_event *optimizer, *handover;
    size_t rest_bytes; /* of shards */
    device_unit units[UNITS];
} worker;

/* Arguments of the test's own kernels. */
typedef struct kernel_args {
    program *p;
    const device_unit *unit;
    const unit_model *model;
    const void *memory;
    const value *expected;
    void *to;
    grad_key key;
} kernel_args;

/* Compares this rank's rows of a full tensor with a chunk. */
static inline bool is_chunk(const fc_param *q, const fc_layout *l, const value *full,
                            const char *chunk, fc_dtype dtype)
{
    size_t bytes = q->own_rows * q->inner * fc_dtype_bytes(dtype), o;
    size_t row = q->inner * fc_dtype_bytes(dtype);

    for (o = 0; o < q->outer; o++) {
        const char *at = full->bytes + (o * q->rows + (size_t)l->rank * q->chunk_rows) * row;

        if (bytes > 0 && memcmp(at, chunk + o * bytes, bytes) != 0) {
            return false;
        }
    }
    return true;
}

/* The model's own work: looks at the unsharded parameters. */
static inline void look(const void *args)
{
    const kernel_args *a = args;
    size_t i;

    for (i = 0; i < a->model->n_params; i++) {
        const fc_param *q = &a->unit->params[i];

        if (memcmp((const char *)a->memory + q->full_at, a->expected[i].bytes,
                   numel_of(q) * fc_dtype_bytes(q->compute)) != 0) {
            a->p->n_wrong++;
        }
    }
}

static inline void give_gradient(const void *args)
{
    const kernel_args *a = args;

    write_gradient(a->model, &a->key, a->to);
}

/* The optimizer of one unit: looks at the gradients and changes the shards. */
static inline void step_unit(const void *args)
{
    const kernel_args *a = args;
    size_t i;

    for (i = 0; i < a->model->n_params; i++) {
        const fc_param *q = &a->unit->params[i];
        const char *grad = (const char *)a->memory + q->grad_at;
        const void *from = grad;

        if (!q->trainable) {
            continue;
        }
        if (!is_chunk(q, &a->unit->layout, &a->model->grads[a->key.step][i], grad, q->grad)) {
            a->p->n_wrong++;
        }
        fc_kern_reduce(q->grad, q->orig)(a->p->shards[a->key.rank][a->key.unit][i], &from, 1,
                                         q->outer * q->own_rows * q->inner, -64, true);
    }
}

static inline fc_label label(const worker *w, int unit, const char *what)
{
    return (fc_label){w->p->units[unit].name, what, 0};
}

static inline fc_status look_at(worker *w, int unit, const value *expected, const void *full,
                                const char *what)
{
    const device_unit *d = &w->units[unit];
    kernel_args args = {
        .p = w->p, .unit = d, .model = &w->p->units[unit], .memory = full, .expected = expected};
    fc_sim_range range = {full, d->layout.full_bytes, false};

    return fc_sim_launch(w->device, w->compute, label(w, unit, what), &range, 1, look, &args,
                         sizeof(args));
}

/* `second` comes behind what is in `first` by now. */
static inline fc_status chain(worker *w, fc_stream *first, fc_stream *second)
{
    if (first == second) {
        return FC_OK;
    }
    FC_TRY(w->ops->record(w->device, w->handover, first));
    return w->ops->wait(w->device, second, w->handover);
}

/* The optimizer's own memory. */
static inline fc_status make_out(worker *w, int unit, void **out)
{
    size_t bytes = w->units[unit].layout.grad_bytes;

    if (w->p->units[unit].is_offloaded) {
        return fc_sim_host_alloc(w->device, label(w, unit, "reduced gradients"), bytes, out);
    }
    FC_TRY(w->ops->alloc(w->device, w->step, label(w, unit, "reduced gradients"), bytes, out));
    return chain(w, w->step, w->compute);
}

static inline fc_status post_backward(worker *w, grad_key k, const micro_model *m, bool called)
{
    const unit_model *u = &w->p->units[k.unit];
    device_unit *d = &w->units[k.unit];
    void *grads[PARAMS] = {NULL};
    const void *full[PARAMS] = {NULL};
    bool is_reduced = false;
    fc_schedule_grads given = {
        .types = u->gives_types ? u->given : NULL, .accumulate = d->out != NULL, .sync = m->sync};
    void *out = d->out;
    int i;

    for (i = 0; called && m->is_used[k.unit] && i < (int)u->n_params; i++) {
        size_t bytes = numel_of(&u->params[i]) * fc_dtype_bytes(type_of_gradient(u, i));
        kernel_args args = {.p = w->p, .model = u};

        k.param = i;
        if (!has_gradient(u, &k)) {
            continue;
        }
        FC_TRY(
            w->ops->alloc(w->device, w->compute, label(w, k.unit, "gradient"), bytes, &grads[i]));
        args.key = k;
        args.to = grads[i];
        FC_TRY(fc_sim_launch(w->device, w->compute, label(w, k.unit, "backward"),
                             &(fc_sim_range){grads[i], bytes, true}, 1, give_gradient, &args,
                             sizeof(args)));
        full[i] = grads[i];
        given.full = full;
    }
    if (out == NULL) {
        FC_TRY(make_out(w, k.unit, &out));
    }
    given.out = out;
    FC_TRY(fc_schedule_post_backward(d->unit, &given, &is_reduced));
    if (is_reduced && u->is_offloaded && u->is_peeked_at) {
        FC_TRY(fc_schedule_await_gradients(w->schedule));
        fc_sim_host_access(w->device, label(w, k.unit, "hook"),
                           (fc_sim_range){out, d->layout.grad_bytes, false});
    }
    for (i = 0; i < PARAMS; i++) {
        w->ops->free(w->device, grads[i]);
    }
    if (is_reduced || d->out != NULL) {
        d->out = out;
    } else {
        w->ops->free(w->device, out);
    }
    return FC_OK;
}

static inline fc_status forward(worker *w, int step, const micro_model *m, bool is_eval)
{
    bool is_turned = w->p->turns_around && w->rank == w->p->n_shards - 1;
    void *full;
    int i;

    for (i = 0; i < m->n_calls; i++) {
        int unit = m->calls[is_turned && i > 0 ? m->n_calls - i : i];
        device_unit *d = &w->units[unit];
        const unit_model *u = &w->p->units[unit];

        FC_TRY(fc_schedule_pre_forward(d->unit, &full));
        FC_TRY(look_at(w, unit, is_eval ? u->judged[step] : u->seen[step], full, "forward"));
        if (i > 0) {
            FC_TRY(fc_schedule_post_forward(d->unit));
        }
    }
    return fc_schedule_post_forward(w->units[m->calls[0]].unit);
}

static _Thread_local bool is_resharding; /* a guest is, which returns nothing */

/* Another stream looks at a unit beside a forward and its backward. */
static inline fc_status visit(worker *w, int step, const micro_model *m)
{
    fc_stream *const compute = w->compute, *const guest = w->p->streams[w->rank][STREAMS - 1];
    fc_schedule_unit *unit = w->units[m->visited].unit;
    void *full;

    FC_TRY(fc_schedule_read_shards(w->schedule, guest));
    FC_TRY(fc_schedule_unshard(unit, &full));
    w->compute = guest;
    FC_TRY(look_at(w, m->visited, w->p->units[m->visited].seen[step], full, "visit"));
    w->compute = compute;
    if (m->leaves_sharded) {
        is_resharding = true;
        fc_schedule_reshard(unit);
        is_resharding = false;
    }
    return fc_schedule_read_shards(w->schedule, compute);
}

static inline fc_status backward(worker *w, int step, int micro)
{
    const micro_model *m = &w->p->steps[step].micros[micro];
    grad_key k = {.step = step, .micro = micro, .rank = w->rank};
    void *full;
    int i;

    FC_TRY(fc_schedule_pre_backward(w->units[m->calls[0]].unit, &full));
    FC_TRY(look_at(w, m->calls[0], w->p->units[m->calls[0]].seen[step], full, "backward"));
    for (i = m->n_calls - 1; i >= 0; i--) {
        k.unit = m->calls[i];
        k.call = i;
        if (i > 0) {
            FC_TRY(fc_schedule_pre_backward(w->units[k.unit].unit, &full));
            FC_TRY(look_at(w, k.unit, w->p->units[k.unit].seen[step], full, "backward"));
        }
        FC_TRY(post_backward(w, k, m, true));
    }
    for (k.unit = 0, k.call = 0; k.unit < w->p->n_units; k.unit++) {
        if (!is_called(m, k.unit)) {
            FC_TRY(post_backward(w, k, m, false));
        }
    }
    return fc_schedule_end_backward(w->schedule, m->is_last);
}

static inline void touch_shards(worker *w, int unit)
{
    const fc_layout *l = &w->units[unit].layout;
    size_t i;

    for (i = 0; i < l->n_params; i++) {
        const fc_param *q = &l->params[i];
        size_t bytes = q->outer * q->own_rows * q->inner * fc_dtype_bytes(q->orig);

        fc_sim_host_access(w->device, label(w, unit, "write by the host"),
                           (fc_sim_range){w->units[unit].shards[i], bytes, true});
    }
}

static inline fc_status step_units(worker *w, int step)
{
    int unit;

    FC_TRY(chain(w, w->compute, w->step));
    for (unit = 0; unit < w->p->n_units; unit++) {
        device_unit *d = &w->units[unit];
        const unit_model *u = &w->p->units[unit];
        kernel_args args = {.p = w->p, .unit = d, .model = u, .memory = d->out};
        fc_sim_range ranges[1 + PARAMS] = {{d->out, d->layout.grad_bytes, false}};
        size_t i;

        args.key.rank = w->rank;
        args.key.unit = unit;
        args.key.step = step;
        if ((d->out != NULL) != u->is_stepped[step]) {
            w->p->n_wrong++;
        }
        if (u->is_offloaded) { /* frozen ones too: somebody may load them */
            touch_shards(w, unit);
        }
        if (d->out == NULL) {
            continue;
        }
        for (i = 0; i < u->n_params; i++) {
            const fc_param *q = &d->params[i];

            ranges[1 + i] = (fc_sim_range){
                d->shards[i], q->outer * q->own_rows * q->inner * fc_dtype_bytes(q->orig), true};
        }
        if (u->is_offloaded) {
            fc_sim_host_access(w->device, label(w, unit, "optimizer"), ranges[0]);
            step_unit(&args);
        } else {
            FC_TRY(fc_sim_launch(w->device, w->step, label(w, unit, "optimizer"), ranges,
                                 1 + u->n_params, step_unit, &args, sizeof(args)));
        }
        w->ops->free(w->device, d->out);
        d->out = NULL;
    }
    return FC_OK;
}

static inline void halve_shards(const void *args)
{
    const kernel_args *a = args;
    size_t i;

    for (i = 0; i < a->model->n_params; i++) {
        const fc_param *q = &a->unit->params[i];

        halve(q->orig, a->p->shards[a->key.rank][a->key.unit][i],
              q->outer * q->own_rows * q->inner);
    }
}

/* Somebody loads a checkpoint, say. Units that evaluation left unsharded are told so; slices and
 * prefetches are not used again anyway. */
static inline fc_status change_shards(worker *w, int unit)
{
    const unit_model *u = &w->p->units[unit];
    device_unit *d = &w->units[unit];
    kernel_args args = {.p = w->p, .unit = d, .model = u};
    fc_sim_range ranges[PARAMS];
    size_t i;

    args.key.rank = w->rank;
    args.key.unit = unit;
    if (u->reshard == RESHARD_NEVER || unit == 0) {
        fc_schedule_reshard(d->unit);
    }
    if (u->is_offloaded) {
        touch_shards(w, unit);
        halve_shards(&args);
        return FC_OK;
    }
    for (i = 0; i < u->n_params; i++) {
        const fc_param *q = &d->params[i];

        ranges[i] = (fc_sim_range){
            d->shards[i], q->outer * q->own_rows * q->inner * fc_dtype_bytes(q->orig), true};
    }
    return fc_sim_launch(w->device, w->compute, label(w, unit, "change"), ranges, u->n_params,
                         halve_shards, &args, sizeof(args));
}

/* The schedule gets the optimizer's event, or compute comes behind it. */
static inline fc_status begin(worker *w, bool gives_event)
{
    if (!gives_event) {
        FC_TRY(w->ops->wait(w->device, w->compute, w->optimizer));
    }
    return fc_schedule_begin(w->schedule, w->compute, gives_event ? w->optimizer : NULL);
}

/* A forward without a backward; afterwards somebody may write shards. */
static inline fc_status evaluate(worker *w, int step)
{
    const step_model *s = &w->p->steps[step];
    int unit;

    FC_TRY(begin(w, false));
    FC_TRY(forward(w, step, &s->micros[0], true));
    if (s->ends_eval > 0) {
        FC_TRY(s->ends_eval == 1 ? fc_schedule_end_backward(w->schedule, true)
                                 : fc_schedule_end_forward(w->schedule));
    }
    for (unit = 0; s->halves && unit < w->p->n_units; unit++) {
        FC_TRY(change_shards(w, unit));
    }
    return FC_OK;
}

/* No unit stays unsharded, keeps a slice or holds gradients after a step. */
static inline bool is_all_sharded(const program *p, int step)
{
    const step_model *s = &p->steps[step];
    int unit, i;

    for (unit = 0; unit < p->n_units; unit++) {
        if (p->units[unit].reshard == RESHARD_TO_FEW) {
            return false;
        }
    }
    for (i = 0; i < s->n_micros; i++) {
        if (s->micros[i].sync != FC_SYNC_ALL) {
            return false;
        }
    }
    return true;
}

static inline fc_status train(worker *w)
{
    int step, micro, unit;

    for (step = 0; step < w->p->n_steps; step++) {
        const step_model *s = &w->p->steps[step];

        for (unit = 0; w->p->moves_sums && step == 1 && unit < w->p->n_units; unit++) {
            fc_schedule_set_reduce(w->units[unit].unit, w->p->gather[w->rank]);
        }
        for (unit = 0; unit < w->p->n_units; unit++) {
            FC_TRY(fc_schedule_set_resident(w->units[unit].unit, w->p->units[unit].is_resident[step]
                                                                     ? w->units[unit].resident
                                                                     : NULL));
        }
        if (s->has_eval) {
            FC_TRY(evaluate(w, step));
        }
        for (micro = 0; micro < s->n_micros; micro++) {
            bool gives = s->gives_event && micro == 0 && step > 0 && !s->has_eval;

            FC_TRY(begin(w, gives));
            if (s->micros[micro].is_visited_first) {
                FC_TRY(visit(w, step, &s->micros[micro]));
            }
            FC_TRY(forward(w, step, &s->micros[micro], false));
            if (s->micros[micro].is_visited) {
                FC_TRY(visit(w, step, &s->micros[micro]));
            }
            FC_TRY(backward(w, step, micro));
        }
        FC_TRY(step_units(w, step));
        FC_TRY(w->ops->record(w->device, w->optimizer, w->step));
        if (w->p->fail_at < 0 && is_all_sharded(w->p, step)) {
            CHECK_EQ(fc_sim_bytes(w->device), w->rest_bytes);
        }
    }
    return FC_OK;
}

/* ---- set-up ---- */

static inline fc_status make_shards(worker *w, int unit)
{
    const unit_model *u = &w->p->units[unit];
    device_unit *d = &w->units[unit];
    size_t i, o;

    if (u->may_reside) {
        FC_TRY(w->ops->alloc(w->device, w->compute, label(w, unit, "shards"), d->layout.full_bytes,
                             &d->resident));
    }
    for (i = 0; i < u->n_params; i++) {
        const fc_param *q = &d->params[i];
        size_t row = q->inner * fc_dtype_bytes(q->orig), bytes = q->own_rows * row;
        size_t all_bytes = q->outer * bytes;
        void *memory;

        if (u->may_reside) {
            memory = (char *)d->resident + q->full_at;
        } else if (u->is_offloaded) {
            FC_TRY(fc_sim_host_alloc(w->device, label(w, unit, "shard"), all_bytes, &memory));
        } else {
            FC_TRY(
                w->ops->alloc(w->device, w->compute, label(w, unit, "shard"), all_bytes, &memory));
        }
        for (o = 0; o < q->outer && bytes > 0; o++) {
            memcpy((char *)memory + o * bytes,
                   u->start[i].bytes + (o * q->rows + (size_t)d->layout.rank * q->chunk_rows) * row,
                   bytes);
        }
        d->shards[i] = memory;
        w->p->shards[w->rank][unit][i] = memory;
    }
    return FC_OK;
}

/* For a gather, of the shards as they are then: what copy-in does next reads it. */
static inline fc_status make_given(void *context)
{
    const device_unit *d = context;
    const worker *w = d->worker;
    const fc_way way = w->p->units[d - w->units].is_offloaded ? FC_TO_DEVICE : FC_ON_DEVICE;
    size_t i;

    for (i = 0; i < d->layout.n_params; i++) {
        const fc_param *q = &d->params[i];
        const size_t bytes = q->outer * q->own_rows * q->inner * fc_dtype_bytes(q->orig);

        if (q->is_made && bytes > 0) {
            FC_TRY(w->ops->copy(w->device, w->copy_in, label(w, (int)(d - w->units), "make"),
                                d->made[i], d->shards[i], bytes, way));
        }
    }
    return FC_OK;
}

static inline fc_status make_maker(worker *w, int unit)
{
    device_unit *d = &w->units[unit];
    size_t i;

    d->worker = w;
    for (i = 0; i < d->layout.n_params; i++) {
        const fc_param *q = &d->params[i];
        const size_t bytes = q->outer * q->own_rows * q->inner * fc_dtype_bytes(q->orig);

        d->given[i] = d->shards[i];
        if (q->is_made) {
            FC_TRY(
                w->ops->alloc(w->device, w->copy_in, label(w, unit, "made"), bytes, &d->made[i]));
            d->given[i] = d->made[i];
        }
    }
    if (w->p->units[unit].is_made) {
        fc_schedule_set_maker(d->unit, &(fc_schedule_maker){.context = d, .make = make_given});
    }
    fc_schedule_set_shards(d->unit, d->given);
    return FC_OK;
}

static inline fc_status make_device_unit(worker *w, int unit)
{
    program *p = w->p;
    const unit_model *u = &p->units[unit];
    device_unit *d = &w->units[unit];
    int shard = w->rank % p->n_shards;
    fc_schedule_unit_options options = {.name = u->name,
                                        .layout = &d->layout,
                                        .gather = p->gather[w->rank],
                                        .reduce = p->reduce[w->rank],
                                        .replicas = p->n_replicas > 1 ? p->replicas[w->rank] : NULL,
                                        .reshard_after_forward = u->reshard != RESHARD_NEVER,
                                        .is_direct = u->is_direct,
                                        .is_offloaded = u->is_offloaded,
                                        .pre_divisor = u->pre_divisor,
                                        .divisor = u->divisor};

    memcpy(d->params, u->params, sizeof(d->params));
    FC_TRY(fc_layout_init(&d->layout, d->params, u->n_params, shard, p->n_shards, false));
    if (u->reshard == RESHARD_TO_FEW) {
        options.n_post_ranks = p->n_few;
        options.post_rank = shard % p->n_few;
        options.post_gather = p->few[w->rank];
    }
    FC_TRY(fc_schedule_add(w->schedule, &options, &d->unit));
    FC_TRY(make_shards(w, unit));
    return make_maker(w, unit);
}

static inline fc_status make_lists(worker *w)
{
    int unit, i;

    for (unit = 0; unit < w->p->n_units; unit++) {
        const unit_model *u = &w->p->units[unit];

        for (i = 0; i < 2; i++) {
            fc_schedule_unit *const list[2] = {w->units[u->list[i][0]].unit,
                                               w->units[u->list[i][1]].unit};

            if (u->has_list[i]) {
                FC_TRY(fc_schedule_set_prefetch(w->units[unit].unit, i == 1, list, 2));
            }
        }
    }
    return FC_OK;
}

/* An allocation has failed: the same program from its beginning, which has to work. */
static inline fc_status begin_anew(worker *w)
{
    int unit;

    CHECK_HAS(fc_last_message(), "simulated device");
    w->p->has_failed = true;
    FC_TRY(fc_schedule_reset(w->schedule));
    for (unit = 0; unit < w->p->n_units; unit++) {
        w->units[unit].out = NULL;
    }
    return train(w);
}

static inline fc_status make_world_of(worker *w, const fc_schedule_options *options)
{
    FC_TRY(fc_schedule_create(options, &w->schedule));
    FC_TRY(w->ops->event_create(w->device, &w->optimizer));
    FC_TRY(w->ops->event_create(w->device, &w->handover));
    for (int unit = 0; unit < w->p->n_units; unit++) {
        FC_TRY(make_device_unit(w, unit));
    }
    return make_lists(w);
}

static inline fc_status train_and_fail(worker *w)
{
    fc_status st;

    w->rest_bytes = fc_sim_bytes(w->device);
    fc_sim_fail_alloc(w->device, w->p->fail_at);
    st = train(w);
    if (st == FC_ERR_NOMEM && w->p->fail_at >= 0) {
        st = begin_anew(w);
    }
    fc_sim_fail_alloc(w->device, -1);
    w->p->peak_bytes[w->rank] = fc_sim_peak_bytes(w->device) - w->rest_bytes;
    return st;
}

static inline fc_status await_streams(const worker *w, fc_stream **streams)
{
    fc_event *event;
    fc_status st = FC_OK;

    FC_TRY(w->ops->event_create(w->device, &event));
    for (int i = 0; i < STREAMS && st == FC_OK; i++) {
        FC_TRY(w->ops->record(w->device, event, streams[i]));
        st = w->ops->synchronize(w->device, event);
    }
    w->ops->event_destroy(w->device, event);
    return st;
}

static inline fc_status work(fc_device *device, int rank, void *arg)
{
    static worker workers[RANKS]; /* what a rank that fails has queued reads its own still */
    program *p = arg;
    fc_stream **streams = p->streams[rank];
    worker *w = &workers[rank];
    *w = (worker){.p = p,
                  .device = device,
                  .ops = device->ops,
                  .rank = rank,
                  .compute = streams[0],
                  .copy_in = streams[1],
                  .gather = streams[2],
                  .reduce = streams[3],
                  .all_reduce = streams[4],
                  .step = streams[p->steps_beside ? 5 : 0]};
    fc_schedule_options options = {device,        w->copy_in,         w->gather,      w->reduce,
                                   w->all_reduce, p->n_reduce_inputs, p->max_gathers, p->without};
    fc_status st;

    if (p->wrap != NULL) {
        FC_TRY(p->wrap(device, &options.device));
    }
    st = make_world_of(w, &options);
    st = st == FC_OK ? train_and_fail(w) : st;
    st = st == FC_OK ? await_streams(w, streams) : st;
    w->ops->event_destroy(device, w->optimizer);
    w->ops->event_destroy(device, w->handover);
    fc_schedule_destroy(w->schedule);
    if (p->unwrap != NULL) {
        p->unwrap(options.device);
    }
    return st;
}

/* Communicators over ranks first, first + step, ... */
static inline fc_status make_comm(fc_sim *sim, const char *name, int first, int n, int stride,
                                  fc_device_comm **by_rank)
{
    fc_device_comm *comm;
    int ranks[RANKS] = {0}, i;

    for (i = 0; i < n; i++) {
        ranks[i] = first + i * stride;
    }
    FC_TRY(fc_sim_comm_create(sim, name, ranks, n, &comm));
    for (i = 0; i < n; i++) {
        by_rank[ranks[i]] = comm;
    }
    return FC_OK;
}

static inline void make_world(program *p, fc_sim *sim)
{
    static const char *const names[] = {"compute",    "copy-in",   "gather", "reduce",
                                        "all-reduce", "optimizer", "guest"};
    int n = p->n_shards * p->n_replicas, i, j;

    for (i = 0; i < p->n_replicas; i++) {
        MUST(make_comm(sim, "gathers", i * p->n_shards, p->n_shards, 1, p->gather));
        MUST(make_comm(sim, "reductions", i * p->n_shards, p->n_shards, 1, p->reduce));
        for (j = 0; p->shares_comm && j < p->n_shards; j++) {
            p->reduce[i * p->n_shards + j] = p->gather[i * p->n_shards + j];
        }
    }
    for (i = 0; i < p->n_shards; i++) {
        MUST(make_comm(sim, "replicas", i, p->n_replicas, p->n_shards, p->replicas));
    }
    for (i = 0; i < n; i += p->n_few) {
        MUST(make_comm(sim, "few", i, p->n_few, 1, p->few));
    }
    for (i = 0; i < n; i++) {
        for (j = 0; j < STREAMS; j++) {
            MUST(fc_sim_stream_create(sim, i, names[j], &p->streams[i][j]));
        }
    }
}

static inline void check_shards(program *p)
{
    int rank, unit;
    size_t i;

    for (rank = 0; rank < p->n_shards * p->n_replicas; rank++) {
        for (unit = 0; unit < p->n_units; unit++) {
            const unit_model *u = &p->units[unit];
            fc_param params[PARAMS];
            fc_layout layout;

            memcpy(params, u->params, sizeof(params));
            MUST(fc_layout_init(&layout, params, u->n_params, rank % p->n_shards, p->n_shards,
                                false));
            for (i = 0; i < u->n_params; i++) {
                p->n_wrong += !is_chunk(&params[i], &layout, &u->last[i], p->shards[rank][unit][i],
                                        params[i].orig);
            }
        }
    }
}

/* Mistakes found; the first is written to `first`. */
static inline int run(program *p, uint64_t seed, char *first, size_t first_bytes)
{
    fc_sim *sim = NULL;
    fc_status st;
    int n;

    train_plainly(p);
    MUST(fc_sim_create(p->n_shards * p->n_replicas, seed, &sim));
    CHECK_OR_EXIT(sim != NULL);
    make_world(p, sim);
    fc_sim_limit_collectives(sim, p->n_at_once);
    st = fc_sim_run(sim, work, p);
    p->ended = st;
    n = fc_sim_faults(sim);
    (void)snprintf(first, first_bytes, "%s", fc_sim_fault(sim, 0));
    if (st == FC_OK) {
        check_shards(p);
    }
    if (p->without == 0 && !p->may_fail) {
        CHECK_MSG(st == FC_OK && n == 0, "seed %d: %d faults: %s", (int)seed, n, first);
        CHECK_MSG(p->n_wrong == 0, "seed %d: %d values are wrong", (int)seed, p->n_wrong);
    }
    fc_sim_destroy(sim);
    CHECK_EQ(fc_alloc_live(), 0);
    return n;
}

#endif

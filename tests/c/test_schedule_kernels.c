/* GPU kernels in the schedule: random programs on simulated devices whose moves are launches of the
 * kernels, run thread by thread when their stream gets there. */
#include "emulated_cuda.h"
#include "schedule_world.h"

#define ADDRESSES 8

static fc_device_ops with_kernels;

/* A fc_moves is its plan. */
static fc_status moves_create(fc_device *device, fc_runs *plan, fc_moves **out)
{
    fc_runs *own = fc_alloc(1, sizeof(*own));

    (void)device;
    CHECK_OR_EXIT(own != NULL);
    *own = *plan;
    fc_runs_init(plan);
    *out = (fc_moves *)own;
    return FC_OK;
}

static void moves_destroy(fc_device *device, fc_moves *moves)
{
    fc_runs *own = (fc_runs *)moves;

    (void)device;
    if (own != NULL) {
        fc_runs_clear(own);
    }
    fc_free(own);
}

typedef struct queued_launch {
    const fc_runs *plan;
    uint64_t addresses[ADDRESSES];
    fc_sum sum;
} queued_launch;

static void run_queued(const void *args)
{
    queued_launch q;
    fc_cuda_launch launch = {0};

    memcpy(&q, args, sizeof(q));
    launch.plan = q.plan;
    launch.runs = q.plan->runs;
    launch.stretches = q.plan->stretches;
    launch.addresses = q.addresses;
    if (q.sum.divisor == 1 && !q.sum.accumulate) {
        CHECK_EQ(emulated_move(&launch), 0);
    } else {
        CHECK_EQ(emulated_finish(&launch, q.sum.divisor, q.sum.accumulate), 0);
    }
}

static fc_status launch_move(fc_device *device, fc_stream *stream, fc_label what,
                             const fc_move *move)
{
    const fc_runs *plan = (const fc_runs *)move->moves;
    queued_launch q = {.plan = plan, .sum = {move->divisor, move->accumulate}};
    size_t i;

    for (i = 0; i < plan->n_bases; i++) {
        CHECK_OR_EXIT(plan->bases[i] < ADDRESSES);
        q.addresses[plan->bases[i]] = move->addresses[plan->bases[i]];
    }
    return fc_sim_launch_plan(device, stream, what, plan, move->addresses, run_queued, &q,
                              sizeof(q));
}

/* The others of the simulator's functions stay. */
static fc_status put_kernels(fc_device *simulated, fc_device **out)
{
    with_kernels = *simulated->ops;
    with_kernels.moves_create = moves_create;
    with_kernels.moves_destroy = moves_destroy;
    with_kernels.move = launch_move;
    simulated->ops = &with_kernels;
    *out = simulated;
    return FC_OK;
}

static program the_program;

int main(void)
{
    char first[512];
    uint64_t seed;

    for (seed = 0; seed < 300; seed++) {
        make_program(&the_program, seed);
        the_program.wrap = put_kernels;
        (void)run(&the_program, seed, first, sizeof(first));
    }
    return check_result();
}

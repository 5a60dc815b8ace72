/* Units on simulated devices: random programs against a plain computation, every wait of the
 * schedule left out in turn, with gathers of both kinds, and every allocation failing. */
#include "schedule_world.h"

static program the_program;

static int play(uint64_t seed, direct_units direct, uint64_t without, char *first,
                size_t first_bytes)
{
    make_program_of(&the_program, seed, direct);
    the_program.without = without;
    return run(&the_program, seed, first, first_bytes);
}

static void test_random_programs(uint64_t n_seeds)
{
    char first[512];
    uint64_t seed;

    for (seed = 0; seed < n_seeds; seed++) {
        (void)play(seed, DIRECT_SOME, 0, first, sizeof(first));
    }
}

/* As many ranks as two machines of eight have, and numbers that are no power of two. */
static void test_many_ranks(uint64_t n_seeds)
{
    static const shape shapes[] = {{16, 1}, {8, 2}, {4, 4}, {2, 8}, {1, 16}, {5, 3}, {7, 2}};
    char first[512];

    for (uint64_t seed = 0; seed < n_seeds; seed++) {
        make_program_among(&the_program, seed, DIRECT_SOME, shapes,
                           sizeof(shapes) / sizeof(shapes[0]));
        (void)run(&the_program, seed, first, sizeof(first));
    }
}

/* Without any one of its waits the schedule is wrong, and the simulator says so. */
static void test_every_wait_is_needed(direct_units direct, bool is_verbose)
{
    char first[512] = "";
    uint64_t seed;
    int wait;

    for (wait = 0; wait < (int)FC_ORDER_COUNT; wait++) {
        if (direct == DIRECT_ALL && wait == FC_ORDER_RESHARDED) {
            continue; /* slices are staged */
        }
        for (seed = 0; seed < 400; seed++) {
            if (play(seed, direct, UINT64_C(1) << wait, first, sizeof(first)) > 0) {
                break;
            }
        }
        CHECK_MSG(seed < 400, "nobody misses %s", fc_schedule_wait_name((fc_schedule_wait)wait));
        CHECK_HAS(seed < 400 ? first : "race", "race on rank");
        if (is_verbose) {
            (void)printf("%s\n  seed %d: %s\n", fc_schedule_wait_name((fc_schedule_wait)wait),
                         (int)seed, first);
        }
    }
}

/* Any allocation may fail; after a reset the same program gives the same numbers. */
static void test_failed_allocations(void)
{
    char first[512];
    uint64_t seed;
    int64_t n;

    for (seed = 0; seed < 12; seed++) {
        for (n = 0;; n++) {
            make_program(&the_program, seed);
            /* Several ranks would fail at different places. */
            the_program.n_shards = the_program.n_replicas = the_program.n_few = 1;
            the_program.n_steps = 1;
            the_program.steps[0].halves = false; /* it would happen twice */
            the_program.fail_at = n;
            (void)run(&the_program, seed, first, sizeof(first));
            if (!the_program.has_failed) {
                break;
            }
        }
        CHECK(n > 0);
    }
}

int main(int argc, char **argv)
{
    uint64_t n_seeds = argc > 1 ? (uint64_t)strtoul(argv[1], NULL, 10) : 1000;

    test_random_programs(n_seeds);
    test_many_ranks(n_seeds / 40);
    test_every_wait_is_needed(DIRECT_ALL, argc > 1);
    test_every_wait_is_needed(DIRECT_NONE, argc > 1);
    test_failed_allocations();
    return check_result();
}

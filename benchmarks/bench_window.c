/* What a process pays for what it shows of itself: per unit and step, and per phase.
 *
 * Usage: gcc -O2 -Icsrc benchmarks/bench_window.c csrc/window/window.c csrc/base/alloc.c
 * csrc/base/clock.c csrc/base/status.c -o build/bench_window -pthread; then without arguments. The
 * fastest of many rounds is shown, in nanoseconds.
 */
#include "base/clock.h"
#include "window/window.h"

#include <stdio.h>

#define N_ROUNDS 50
#define N_CALLS 1000

/* What a unit that is trained makes in a step: two uses, and three marks for the trace. */
static void one_unit(void)
{
    fc_window_use_unit(1);
    fc_window_mark(FC_WINDOW_EVENT_LEFT, 1);
    fc_window_use_unit(1);
    fc_window_mark(FC_WINDOW_EVENT_PASSED, 1);
    fc_window_mark(FC_WINDOW_EVENT_LEFT, 1);
}

static void one_phase(void)
{
    fc_window_enter(FC_WINDOW_FORWARD, 1);
}

static double fastest(void (*call)(void))
{
    int64_t best_ns = INT64_MAX;

    for (int round = 0; round < N_ROUNDS; round++) {
        const int64_t start_ns = fc_now_ns();
        int64_t taken_ns;

        for (int i = 0; i < N_CALLS; i++) {
            call();
        }
        taken_ns = fc_now_ns() - start_ns;
        best_ns = taken_ns < best_ns ? taken_ns : best_ns;
    }
    return (double)best_ns / N_CALLS;
}

int main(void)
{
    const fc_window_config config = {.run = "bench_window", .world = 1, .traces = true};

    for (int traces = 0; traces < 2; traces++) {
        if (traces && fc_window_open(&config) != FC_OK) {
            (void)fprintf(stderr, "%s\n", fc_last_message());
            return 1;
        }
        (void)printf("%-14s a unit and step %6.1f ns, a phase %6.1f ns\n",
                     traces ? "traced:" : "not traced:", fastest(one_unit), fastest(one_phase));
    }
    return 0;
}

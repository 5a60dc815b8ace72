/* Ranks that leave step: how their steps begin, what one of them passes over, and who learns of it;
 * over shared memory and over messages. */
#define _GNU_SOURCE

#include "apart_world.h"

#include "engine/domain_private.h"
#include "engine/exchange.h"
#include "engine/unit.h"
#include "engine/waits.h"

#define TEXT_BYTES 1024

/* ---- how a step begins ---- */

/* Whom a rank finds to differ from itself where rank 1 alone is another. */
static int other_of(const world *w)
{
    return w->rank == 1 ? 0 : 1;
}

static const char *use_of(fc_phase phase)
{
    return phase == FC_PHASE_FORWARD           ? "a forward with gradients"
           : phase == FC_PHASE_FORWARD_NO_GRAD ? "a forward without gradients"
                                               : "unshard()";
}

/* Rank 1 uses the model otherwise. Each rank says what it does itself first. */
static void check_uses(world *w, int step, fc_phase common, fc_phase other)
{
    const fc_phase mine = w->rank == 1 ? other : common, theirs = w->rank == 1 ? common : other;
    char text[TEXT_BYTES];

    begin(w, mine, 0, 7);
    together(w);
    (void)snprintf(text, sizeof(text),
                   "step %d is %s on rank %d and %s on rank %d: all ranks must use the model alike "
                   "(evaluate, and read full parameters, on all ranks or on none)",
                   step, use_of(mine), 10 + w->rank, use_of(theirs), 10 + other_of(w));
    CHECK_FAILS(read_unit(w, 0), FC_ERR_PEER, text);
    CHECK(!fc_domain_is_open(w->domain));
    together(w);
}

static const char *name_of(uint32_t opener)
{
    static const char *const names[] = {"Model", "Model.embed", "Model.head"};

    return opener < N_OPENERS ? names[opener] : "?";
}

/* Rank 1 begins elsewhere. All say the same of two ranks. */
static void check_openers(world *w, int step, uint32_t common, uint32_t other)
{
    const int first = w->rank == 2 ? 1 : 0, second = w->rank == 2 ? 2 : 1;
    const uint32_t at_first = first == 1 ? other : common, at_second = second == 1 ? other : common;
    char text[TEXT_BYTES];

    begin(w, FC_PHASE_FORWARD, w->rank == 1 ? other : common, w->rank == 1 ? 21 : 20);
    together(w);
    (void)snprintf(text, sizeof(text),
                   "ranks are out of step: step %d begins in the forward of %s on rank %d, whose "
                   "shards have seen %d optimizer steps, and of %s on rank %d (%d steps). Call the "
                   "whole model on all ranks, or the same units in the same order; what only some "
                   "ranks run belongs inside the model's forward",
                   step, name_of(at_first), 10 + first, first == 1 ? 21 : 20, name_of(at_second),
                   10 + second, second == 1 ? 21 : 20);
    CHECK_FAILS(read_unit(w, 0), FC_ERR_MISMATCH, text);
    CHECK(!fc_domain_is_open(w->domain));
    together(w);
}

/* Shards of rank 1 have seen other steps. */
static void check_updates(world *w, int step, size_t unit, uint64_t common, uint64_t other)
{
    static const char *const names[N_UNITS] = {"embed", "layers.0", "head"};
    const int first = w->rank == 2 ? 1 : 0, second = w->rank == 2 ? 2 : 1;
    char text[TEXT_BYTES];

    begin(w, FC_PHASE_FORWARD, 0, w->rank == 1 ? other : common);
    together(w);
    (void)snprintf(text, sizeof(text),
                   "ranks are out of step at unit %s: step %d begins after %d optimizer steps (and "
                   "loads) over the shards of rank %d, and after %d over those of rank %d; " CAUSES
                   ", a step() that was left out or made twice; " CURE,
                   unit < N_UNITS ? names[unit] : "(root)", step,
                   (int)(first == 1 ? other : common), 10 + first,
                   (int)(second == 1 ? other : common), 10 + second);
    CHECK_FAILS(unit < N_UNITS ? read_unit(w, unit) : fc_domain_close(w->domain), FC_ERR_MISMATCH,
                text);
    CHECK(!fc_domain_is_open(w->domain));
    together(w);
}

static void body_openings(int rank, int n_ranks, void *arg)
{
    const bool is_one = rank == 1;
    int step = 1;
    world w;

    join(&w, *(const travel *)arg, rank, n_ranks, false);
    run_phase(&w, FC_PHASE_FORWARD, 1, 3);
    run_phase(&w, FC_PHASE_BACKWARD, is_one ? 2 : 0, is_one ? 4 : 5); /* the kind alone matters */
    check_uses(&w, ++step, FC_PHASE_FORWARD, FC_PHASE_FORWARD_NO_GRAD);
    run_phase(&w, FC_PHASE_FORWARD_NO_GRAD, 2, 3);
    check_uses(&w, step += 2, FC_PHASE_UNSHARD, FC_PHASE_FORWARD);
    check_uses(&w, ++step, FC_PHASE_FORWARD_NO_GRAD, FC_PHASE_UNSHARD);
    check_openers(&w, ++step, 0, 2);
    check_openers(&w, ++step, 1, N_OPENERS);
    /* Whose names do not fit are alike. */
    run_phase(&w, FC_PHASE_FORWARD, is_one ? 0xffff : 0x123456, 9);
    step++;
    check_updates(&w, ++step, 0, 12, 11);
    check_updates(&w, ++step, 2, 0, 1);
    if (w.kind == MAPPED) { /* who reads nothing learns it at the end */
        check_updates(&w, ++step, N_UNITS, 0, 1);
    }
    run_phase(&w, FC_PHASE_FORWARD, 0, is_one ? FC_UPDATES_UNKNOWN : 13);
    run_phase(&w, FC_PHASE_FORWARD, 0, is_one ? 14 : FC_UPDATES_UNKNOWN);
    run_phase(&w, FC_PHASE_UNSHARD, is_one ? 1 : 2, is_one ? 15 : 16);
    leave_world(&w);
}

/* Over shared memory who looks at nobody's beginning is told what the others have found. */
static void body_told(int rank, int n_ranks, void *arg)
{
    world w;

    (void)arg;
    join(&w, MAPPED, rank, n_ranks, false);
    for (int step = 1; step <= 3; step++) {
        begin(&w, rank == 1 ? FC_PHASE_FORWARD_NO_GRAD : FC_PHASE_FORWARD, 0, 0);
        together(&w);
        if (rank < 2) {
            CHECK_EQ(read_unit(&w, 0), FC_ERR_PEER);
        }
        together(&w);
        if (rank >= 2) {
            char text[TEXT_BYTES];

            (void)snprintf(text, sizeof(text),
                           "step %d is a forward with gradients on rank 10 and a forward without "
                           "gradients on rank 11: all ranks must use the model alike (evaluate, "
                           "and read full parameters, on all ranks or on none)",
                           step);
            CHECK_FAILS(fc_domain_close(w.domain), FC_ERR_MISMATCH, text);
        }
        together(&w);
    }
    run_phase(&w, FC_PHASE_FORWARD, 0, 0);
    leave_world(&w);
}

/* What a rank finds in its own phase it says in its own words, though another one has failed that
 * phase already. */
static void body_own_words(int rank, int n_ranks, void *arg)
{
    world w;

    join(&w, *(const travel *)arg, rank, n_ranks, false);
    run_phase(&w, FC_PHASE_FORWARD, 0, 0);
    if (rank != 1) {
        begin(&w, rank == 2 ? FC_PHASE_UNSHARD : FC_PHASE_FORWARD, 0, 0);
    }
    together(&w);
    if (rank == 2) {
        CHECK_EQ(read_unit(&w, 0), FC_ERR_PEER);
        CHECK_HAS(fc_last_message(), "is unshard() on rank 12 and a forward with gradients on "
                                     "rank 10");
    }
    together(&w);
    if (rank == 1) {
        (void)usleep(10000); /* most often rank 0 waits for this one by then */
        begin(&w, FC_PHASE_FORWARD, 0, 0);
    }
    if (rank != 2) {
        CHECK_EQ(read_unit(&w, 0), FC_ERR_PEER);
        CHECK_HAS(fc_last_message(), "and unshard() on rank 12");
    }
    leave_world(&w);
}

/* Over messages: rank 2 has failed a phase and left for good. Rank 0, which was in that phase and
 * came to no collective of it, is told in the next one as it waits for rank 1. */
static void body_left_behind(int rank, int n_ranks, void *arg)
{
    world w;

    (void)arg;
    join(&w, WATCHED, rank, n_ranks, false);
    begin(&w, FC_PHASE_FORWARD, rank == 1, 0);
    together(&w);
    if (rank == 2) {
        CHECK_EQ(read_unit(&w, 0), FC_ERR_MISMATCH);
        CHECK_HAS(fc_last_message(), "begins in the forward of Model.embed on rank 11");
        fc_domain_leave(w.domain);
    }
    together(&w);
    if (rank == 0) {
        end(&w);
        begin(&w, FC_PHASE_BACKWARD, 0, 0);
        CHECK_EQ(read_unit(&w, 0), FC_ERR_MISMATCH);
        CHECK_HAS(fc_last_message(), "begins in the forward of Model.embed on rank 11");
    }
    together(&w);
    leave_world(&w);
}

/* Who was told tells others: ranks 2 and 3 differ, and rank 0, which waits for their gradients,
 * fails in turn, with their words. */
static void body_retold(int rank, int n_ranks, void *arg)
{
    const char *const text = "step 1 begins after 2 optimizer steps (and loads) over the shards of "
                             "rank 12, and after 3 over those of rank 13";
    world w;

    (void)arg;
    join(&w, MAPPED, rank, n_ranks, false);
    begin(&w, FC_PHASE_FORWARD, 0, rank >= 2 ? (uint64_t)rank : FC_UPDATES_UNKNOWN);
    together(&w);
    if (rank >= 2) {
        CHECK_EQ(read_unit(&w, 0), FC_ERR_MISMATCH);
        CHECK_HAS(fc_last_message(), text);
    } else if (rank == 1) {
        fc_domain_mark_closed(w.domain);
    }
    together(&w);
    if (rank == 0) {
        fc_unit *unit = unit_of(&w, 0);
        char *parts;

        fc_exchange_set_present(unit, 0);
        CHECK_OK(fc_exchange_reserve(unit, fc_unit_part_bytes(unit, FC_WIRE_REDUCE), FC_WIRE_REDUCE,
                                     &parts));
        fc_exchange_commit(unit);
        CHECK_EQ(fc_exchange_await(unit), FC_ERR_MISMATCH);
        CHECK_HAS(fc_last_message(), text);
        fc_domain_fail(w.domain);
    }
    together(&w);
    if (rank == 1) {
        CHECK_EQ(fc_domain_close(w.domain), FC_ERR_MISMATCH);
        CHECK_HAS(fc_last_message(), text);
    }
    together(&w);
    leave_world(&w);
}

/* Sentences are of their phase: who fails the next one by an exception has no other reason. */
static void body_failed_after(int rank, int n_ranks, void *arg)
{
    char text[TEXT_BYTES];
    world w;

    join(&w, *(const travel *)arg, rank, n_ranks, false);
    check_uses(&w, 1, FC_PHASE_FORWARD, FC_PHASE_UNSHARD);
    begin(&w, FC_PHASE_FORWARD, 0, 0);
    together(&w);
    if (rank == 1) {
        fc_domain_fail(w.domain);
    }
    together(&w);
    if (rank != 1) {
        (void)snprintf(text, sizeof(text),
                       "rank 11 left the forward of step 2 by an exception while rank %d was in "
                       "%s; the gradients of this step are not complete",
                       10 + rank,
                       w.kind == MAPPED ? "the end of forward" : "all-gather of unit embed");
        CHECK_FAILS(w.kind == MAPPED ? fc_domain_close(w.domain) : read_unit(&w, 0), FC_ERR_PEER,
                    text);
    }
    together(&w);
    leave_world(&w);
}

/* ---- a backward that one rank passes over ---- */

static int step_of_skip; /* whose backward it is */

/* What `rank` says of rank 1, which is in the next step's forward. */
static void describe_skip(char *text, const char *unit, int rank, int backward, int before)
{
    (void)snprintf(text, TEXT_BYTES,
                   "ranks are out of step at unit %s: rank 11 went on to the forward of step %d "
                   "without the backward of step %d%s that rank %d is in; optimizer steps that "
                   "their shards have seen: %d on rank 11, %d on rank %d; " CAUSES "; " CURE,
                   unit, step_of_skip + 1, step_of_skip, backward > 1 ? " (number 2 of it)" : "",
                   10 + rank, before + 1, before, 10 + rank);
}

/* Rank 1 leaves out backward number `backward`; in two domains of the root, if there are so many.
 */
static void skip(world *w, int backward)
{
    step_of_skip++;
    run_phase(w, FC_PHASE_FORWARD, 0, 4);
    for (int b = 1; b < backward; b++) {
        run_phase(w, FC_PHASE_BACKWARD, 0, 4);
    }
    begin(w, w->rank == 1 ? FC_PHASE_FORWARD : FC_PHASE_BACKWARD, 0, w->rank == 1 ? 5 : 4);
    together(w);
}

/* All that are in it say so; rank 1 is told once, and all go on. */
static void body_skipped(int rank, int n_ranks, void *arg)
{
    for (int backward = 1; backward <= 2; backward++) {
        char text[TEXT_BYTES];
        world w;

        join(&w, *(const travel *)arg, rank, n_ranks, false);
        step_of_skip = 0;
        skip(&w, backward);
        if (rank != 1) {
            describe_skip(text, "layers.0", rank, backward, 4);
            CHECK_FAILS(read_unit(&w, 1), FC_ERR_MISMATCH, text);
            CHECK(!fc_domain_is_open(w.domain));
        }
        together(&w);
        if (rank == 1) {
            describe_skip(text, "layers.0", 0, backward, 4);
            CHECK_FAILS(read_unit(&w, 2), FC_ERR_MISMATCH, text);
            CHECK(fc_domain_is_open(w.domain));
        }
        together(&w);
        if (rank != 1) {
            begin(&w, FC_PHASE_FORWARD, 0, 5);
        }
        CHECK_OK(read_unit(&w, 0));
        end(&w);
        run_phase(&w, FC_PHASE_BACKWARD, 0, 5);
        leave_world(&w);
    }
}

/* Over messages who was told, and fails the phase because of that, tells those who come to it. */
static void body_skipped_and_told(int rank, int n_ranks, void *arg)
{
    char text[TEXT_BYTES];
    world w;

    (void)arg;
    join(&w, WATCHED, rank, n_ranks, false);
    step_of_skip = 0;
    skip(&w, 1);
    describe_skip(text, "embed", 0, 1, 4);
    if (rank != 1) {
        CHECK_EQ(read_unit(&w, 0), FC_ERR_MISMATCH);
    }
    together(&w);
    if (rank == 1) {
        CHECK_FAILS(read_unit(&w, 0), FC_ERR_MISMATCH, text);
        fc_domain_fail(w.domain);
    }
    together(&w);
    if (rank != 1) {
        begin(&w, FC_PHASE_FORWARD, 0, 5);
        CHECK_FAILS(read_unit(&w, 0), FC_ERR_MISMATCH, text);
    }
    together(&w);
    leave_world(&w);
}

/* Two have passed it over: both are told. */
static void body_two_skip(int rank, int n_ranks, void *arg)
{
    char text[TEXT_BYTES];
    world w;

    join(&w, *(const travel *)arg, rank, n_ranks, false);
    run_phase(&w, FC_PHASE_FORWARD, 0, 4);
    begin(&w, rank > 0 ? FC_PHASE_FORWARD : FC_PHASE_BACKWARD, 0, rank > 0 ? 5 : 4);
    together(&w);
    step_of_skip = 1;
    describe_skip(text, "embed", 0, 1, 4);
    if (rank == 0) {
        CHECK_FAILS(read_unit(&w, 0), FC_ERR_MISMATCH, text);
    }
    together(&w);
    if (rank > 0) {
        CHECK_FAILS(read_unit(&w, 0), FC_ERR_MISMATCH, text);
    }
    together(&w);
    leave_world(&w);
}

/* Who has said it may have left for good before the one that is meant has heard of it, as it waits
 * for another. */
static void body_skipped_and_left(int rank, int n_ranks, void *arg)
{
    char text[TEXT_BYTES];
    world w;

    join(&w, *(const travel *)arg, rank, n_ranks, false);
    skip(&w, 1);
    describe_skip(text, "head", 2, 1, 4);
    if (rank == 2) {
        CHECK_FAILS(read_unit(&w, 2), FC_ERR_MISMATCH, text);
        fc_domain_leave(w.domain);
    }
    together(&w);
    if (rank == 1) {
        CHECK_FAILS(read_unit(&w, 0), FC_ERR_MISMATCH, text);
    }
    together(&w);
    leave_world(&w);
}

/* Who has passed it over and then left the next phase by an exception is told in the one after
 * that, in each domain of the root; whoever it is. */
static void body_skipped_and_failed(int rank, int n_ranks, void *arg)
{
    const int skipper = *(const int *)arg;
    const bool skips = rank == skipper;

    for (int told_in = 0; told_in < 2; told_in++) {
        char text[64];
        world w;

        join(&w, MAPPED, rank, n_ranks, false);
        join_second(&w);
        run_phase(&w, FC_PHASE_FORWARD, 0, 4);
        begin(&w, skips ? FC_PHASE_FORWARD : FC_PHASE_BACKWARD, 0, skips ? 5 : 4);
        together(&w);
        (void)snprintf(text, sizeof(text), "rank %d went on to the forward of step 2 without",
                       10 + skipper);
        if (!skips) {
            CHECK_EQ(read_unit(&w, 0), FC_ERR_MISMATCH);
            CHECK_HAS(fc_last_message(), text);
        }
        together(&w);
        if (skips) {
            fc_domain_fail(w.domain);
            fc_domain_fail(w.second);
            begin(&w, FC_PHASE_FORWARD, 0, 5);
            CHECK_EQ(read_in(told_in == 0 ? w.domain : w.second, 0), FC_ERR_MISMATCH);
            CHECK_HAS(fc_last_message(), text);
        }
        together(&w);
        leave_world(&w);
    }
}

/* Who was told of it by another one accuses, too: rank 1 has found it and is in the next forward
 * before rank 2, which had passed it over, looks there; rank 0 is not. */
static void body_told_accuses(int rank, int n_ranks, void *arg)
{
    const char *const text =
        "rank 12 went on to the forward of step 2 without the backward of step "
        "1 that rank 11 is in";
    world w;

    (void)arg;
    join(&w, MAPPED, rank, n_ranks, false);
    run_phase(&w, FC_PHASE_FORWARD, 0, 4);
    begin(&w, rank == 2 ? FC_PHASE_FORWARD : FC_PHASE_BACKWARD, 0, 5);
    together(&w);
    if (rank == 1) {
        CHECK_EQ(read_unit(&w, 0), FC_ERR_MISMATCH);
        CHECK_HAS(fc_last_message(), text);
        begin(&w, FC_PHASE_FORWARD, 0, 5);
    }
    together(&w);
    if (rank == 0) {
        CHECK_EQ(fc_domain_close(w.domain), FC_ERR_MISMATCH);
        CHECK_HAS(fc_last_message(), text);
    }
    together(&w);
    if (rank == 2) {
        CHECK_EQ(read_unit(&w, 0), FC_ERR_MISMATCH);
        CHECK_HAS(fc_last_message(), text);
    }
    together(&w);
    leave_world(&w);
}

/* Shards that have not changed may be read over shared memory, not gathered by messages. */
static void body_skipped_unchanged(int rank, int n_ranks, void *arg)
{
    char text[TEXT_BYTES];
    world w;

    join(&w, *(const travel *)arg, rank, n_ranks, false);
    run_phase(&w, FC_PHASE_FORWARD, 0, 4);
    begin(&w, rank == 1 ? FC_PHASE_FORWARD : FC_PHASE_BACKWARD, 0, 4);
    together(&w);
    if (rank != 1 && w.kind == MAPPED) {
        CHECK_OK(read_unit(&w, 0));
        end(&w);
    } else if (rank != 1) {
        (void)snprintf(text, sizeof(text),
                       "without the backward of step 1 that rank %d is in; optimizer steps that "
                       "their shards have seen: 4 on rank 11, 4 on rank %d;",
                       10 + rank, 10 + rank);
        CHECK_EQ(read_unit(&w, 0), FC_ERR_MISMATCH);
        CHECK_HAS(fc_last_message(), text);
    }
    together(&w);
    leave_world(&w);
}

/* A root with two domains: what is found in one ends the phase in both, and who has passed it over
 * is told wherever it comes. */
static void body_skipped_in_two(int rank, int n_ranks, void *arg)
{
    const travel kind = *(const travel *)arg;

    for (int found_in = 0; found_in < 2; found_in++) {
        for (int told_in = 0; told_in < 2; told_in++) {
            fc_domain *domains[2];
            char text[TEXT_BYTES];
            world w;

            join(&w, kind, rank, n_ranks, false);
            join_second(&w);
            domains[0] = w.domain;
            domains[1] = w.second;
            step_of_skip = 0;
            if (told_in != found_in) { /* what was said of an earlier phase plays no part */
                check_uses(&w, ++step_of_skip, FC_PHASE_FORWARD, FC_PHASE_UNSHARD);
            }
            skip(&w, 1);
            if (rank != 1) {
                describe_skip(text, "embed", rank, 1, 4);
                CHECK_FAILS(read_in(domains[found_in], 0), FC_ERR_MISMATCH, text);
                CHECK(!fc_domain_is_open(w.domain) && !fc_domain_is_open(w.second));
            }
            together(&w);
            describe_skip(text, "embed", 0, 1, 4);
            if (rank == 1) {
                CHECK_FAILS(read_in(domains[told_in], 1), FC_ERR_MISMATCH, text);
            }
            together(&w);
            if (rank != 1) {
                begin(&w, FC_PHASE_FORWARD, 0, 5);
            }
            CHECK_OK(read_in(w.domain, 0));
            CHECK_OK(read_in(w.second, 0));
            end(&w);
            leave_world(&w);
        }
    }
}

/* ---- words, where there is no clock ---- */

static void body_words(int rank, int n_ranks, void *arg)
{
    world w;

    (void)arg;
    join(&w, ALONE, rank, n_ranks, false);
    CHECK_OK(read_unit(&w, 0)); /* in no phase */
    CHECK_EQ(w.n_words, 0);
    for (int step = 1; step <= 3; step++) {
        begin(&w, FC_PHASE_FORWARD, 0, 0);
        CHECK_OK(read_unit(&w, 0));
        CHECK_OK(read_unit(&w, 1));
        CHECK_OK(fc_domain_close(w.domain));
        begin(&w, FC_PHASE_BACKWARD, 0, 0);
        CHECK_OK(fc_domain_close(w.domain)); /* in which nothing travels */
        CHECK_EQ(w.n_words, n_ranks > 1 ? step : 0);
        CHECK_EQ(w.n_opened, n_ranks > 1 ? step : 0);
    }
    CHECK_EQ(w.n_failed, 0);
    leave_world(&w);
}

/* One rank is in the forward of a step, the others in a backward. */
static void body_other_phase(int rank, int n_ranks, void *arg)
{
    const int first = rank == 2 ? 1 : 0, second = rank == 2 ? 2 : 1;
    char text[TEXT_BYTES];
    world w;

    (void)arg;
    join(&w, ALONE, rank, n_ranks, false);
    run_phase(&w, FC_PHASE_FORWARD, 0, 5);
    begin(&w, rank == 1 ? FC_PHASE_FORWARD : FC_PHASE_BACKWARD, 0, 6);
    (void)snprintf(
        text, sizeof(text),
        "ranks are out of step at unit head: rank %d is in %s of its step %d and rank %d "
        "in %s of its step %d; optimizer steps that their shards have seen: %d on rank "
        "%d, %d on rank %d; " CAUSES "; " CURE,
        10 + first, first == 1 ? "the forward" : "the backward", first == 1 ? 2 : 1, 10 + second,
        second == 1 ? "the forward" : "the backward", second == 1 ? 2 : 1, first == 1 ? 6 : 5,
        10 + first, second == 1 ? 6 : 5, 10 + second);
    CHECK_FAILS(read_unit(&w, 2), FC_ERR_MISMATCH, text);
    CHECK(!fc_domain_is_open(w.domain));
    CHECK_EQ(w.n_failed, rank != 1); /* who has met nobody in a forward may come to the next one */
    CHECK_EQ(w.n_opened, 2);         /* and blames nobody there for what all have heard of */
    run_phase(&w, FC_PHASE_FORWARD, 0, 6);
    CHECK_EQ(w.n_opened, 3);
    leave_world(&w);
}

static fc_status add_up(world *w)
{
    static float part[4096];
    const fc_present present = {.layout = fc_unit_layout(unit_of(w, 0))};

    return fc_waits_all_reduce(unit_of(w, 0), part, &present);
}

/* Replicas do not meet in forward. Rank 1 leaves one alone and comes to the next backward: its
 * gradients are of a later step. Where all leave one they go on. */
static void body_replicas(int rank, int n_ranks, void *arg)
{
    const int first = rank == 2 ? 1 : 0, second = rank == 2 ? 2 : 1;
    char text[TEXT_BYTES];
    world w;

    (void)arg;
    kind_of_domains = FC_DOMAIN_REPLICATE;
    join(&w, ALONE, rank, n_ranks, false);
    for (int round = 0; round < 3; round++) {
        begin(&w, FC_PHASE_FORWARD, 0, 0);
        w.n_failed = 0;
        if (round == 0 || rank == 1) {
            fc_domain_fail(w.domain);
            CHECK_EQ(w.n_failed, 1);
            begin(&w, FC_PHASE_FORWARD, 0, 0);
        }
        end(&w);
        begin(&w, FC_PHASE_BACKWARD, 0, 0);
        if (round == 0) {
            CHECK_OK(add_up(&w));
        } else {
            (void)snprintf(text, sizeof(text),
                           "ranks are out of step at unit embed: since they met last rank %d has "
                           "left %d forwards or backwards by exceptions, and rank %d %d; " CURE,
                           10 + first, first, 10 + second, second == 1);
            CHECK_FAILS(add_up(&w), FC_ERR_MISMATCH, text);
        }
        end(&w);
    }
    begin(&w, FC_PHASE_BACKWARD, 0, 0);
    CHECK_OK(add_up(&w));
    end(&w);
    CHECK_EQ(w.n_opened, 4);
    leave_world(&w);
}

/* One rank unshards a unit between phases, the others are in a forward; then all of them do. */
static void body_unshard_beside_forward(int rank, int n_ranks, void *arg)
{
    char text[TEXT_BYTES];
    world w;

    (void)arg;
    join(&w, ALONE, rank, n_ranks, false);
    run_phase(&w, FC_PHASE_FORWARD, 0, 5);
    begin(&w, rank == 1 ? FC_PHASE_UNSHARD : FC_PHASE_FORWARD, 0, 5);
    if (rank == 1) {
        fc_domain_mark_closed(w.domain);
    }
    (void)snprintf(text, sizeof(text),
                   "step 2 is %s on rank %d and %s on rank %d: all ranks must use the model alike "
                   "(evaluate, and read full parameters, on all ranks or on none)",
                   rank == 1 ? "unshard()" : "a forward with gradients", 10 + rank,
                   rank == 1 ? "a forward with gradients" : "unshard()", rank == 1 ? 10 : 11);
    CHECK_FAILS(read_unit(&w, 2), FC_ERR_PEER, text);
    CHECK_EQ(w.n_words, 2);
    for (int i = 0; i < 2; i++) {
        begin(&w, FC_PHASE_UNSHARD, 0, 5);
        fc_domain_mark_closed(w.domain);
        CHECK_OK(read_unit(&w, 2));
        CHECK_OK(fc_domain_close(w.domain));
    }
    CHECK_EQ(w.n_words, 4);
    run_phase(&w, FC_PHASE_FORWARD, 0, 5);
    leave_world(&w);
}

/* Their own collective fails, or they have no memory for it. */
static void body_no_words(int rank, int n_ranks, void *arg)
{
    char text[TEXT_BYTES];
    world w;

    (void)arg;
    join(&w, ALONE, rank, n_ranks, false);
    begin(&w, FC_PHASE_FORWARD, 0, 0);
    w.fails_with = FC_ERR_GROUP;
    (void)snprintf(text, sizeof(text),
                   "what ranks tell each other before FSDP unit 'embed' failed on rank %d of %d. A "
                   "rank may have ended, or be in another collective. The group says",
                   rank, n_ranks);
    CHECK_FAILS(read_unit(&w, 0), FC_ERR_GROUP, text);
    w.fails_with = FC_ERR_INTERRUPTED;
    CHECK_FAILS(read_unit(&w, 0), FC_ERR_INTERRUPTED, "no luck");
    w.fails_with = FC_OK;
    CHECK_EQ(w.n_gathers, 2);
    fc_alloc_fail_after(0);
    (void)snprintf(text, sizeof(text), "the words of %d ranks", n_ranks);
    CHECK_EQ(fc_domain_meet(unit_of(&w, 0), "all-gather", 0), FC_OK); /* there are no clocks */
    CHECK_FAILS(read_unit(&w, 0), FC_ERR_NOMEM, text);
    fc_alloc_fail_after(-1);
    CHECK_EQ(w.n_opened, 0);
    CHECK_OK(read_unit(&w, 0));
    CHECK_EQ(w.n_opened, 1);
    CHECK_OK(fc_domain_close(w.domain));
    leave_world(&w);
}

/* ---- what a peer has written ---- */

/* Rank 0 finds that its peer differs, twice; the second time as it has failed the phase. The peer,
 * which has not looked itself, hears of it as it closes. */
static void body_found_late(int rank, int n_ranks, void *arg)
{
    world w;

    (void)arg;
    join(&w, MAPPED, rank, n_ranks, false);
    for (int step = 1; step <= 2; step++) {
        begin(&w, FC_PHASE_FORWARD, (uint32_t)(rank == 1), 0);
        together(&w);
        if (rank == 0) {
            if (step == 2) {
                fc_domain_fail(w.domain);
            }
            CHECK_EQ(read_unit(&w, 0), FC_ERR_MISMATCH);
            CHECK_HAS(fc_last_message(), "begins in the forward of Model on rank 10");
        }
        together(&w);
        if (rank == 1) {
            CHECK_EQ(fc_domain_close(w.domain), FC_ERR_MISMATCH);
            CHECK_HAS(fc_last_message(), "begins in the forward of Model on rank 10");
        }
        together(&w);
    }
    leave_world(&w);
}

/* Of a sentence without an end what fits is told, and of none that its rank has failed. */
static void body_damaged_sentence(int rank, int n_ranks, void *arg)
{
    static char whole[REASON_BYTES];
    world w;

    (void)arg;
    join(&w, MAPPED, rank, n_ranks, false);
    memset(whole, 'x', sizeof(whole) - 1);
    for (int is_empty = 0; is_empty < 2; is_empty++) {
        begin(&w, FC_PHASE_FORWARD, (uint32_t)(rank == 1), 0);
        together(&w);
        if (rank == 0) {
            char *text = domain_reason(w.domain, 0)->text;

            CHECK_EQ(read_unit(&w, 0), FC_ERR_MISMATCH);
            memset(text, 'x', REASON_BYTES);
            text[0] = is_empty != 0 ? '\0' : 'x';
        }
        together(&w);
        if (rank == 1 && is_empty == 0) {
            CHECK_FAILS(fc_domain_close(w.domain), FC_ERR_MISMATCH, whole);
        } else if (rank == 1) {
            CHECK_FAILS(fc_domain_close(w.domain), FC_ERR_PEER,
                        "rank 10 left the forward of step 2 by an exception while rank 11 was in "
                        "the end of forward; the gradients of this step are not complete");
        }
        together(&w);
    }
    leave_world(&w);
}

int main(void)
{
    for (int n = 2; n <= 3; n++) {
        for (travel kind = MAPPED; kind < N_KINDS; kind++) {
            ranks_check(n, body_openings, &kind);
        }
        ranks_check(n, body_other_phase, NULL);
        ranks_check(n, body_replicas, NULL);
        ranks_check(n, body_unshard_beside_forward, NULL);
        ranks_check(n, body_no_words, NULL);
    }
    for (int n = 2; n <= 3; n++) {
        for (travel kind = MAPPED; kind <= WATCHED; kind++) {
            ranks_check(n, body_failed_after, &kind);
            ranks_check(n, body_skipped, &kind);
            ranks_check(n, body_skipped_unchanged, &kind);
            ranks_check(n, body_skipped_in_two, &kind);
        }
    }
    for (travel kind = MAPPED; kind <= WATCHED; kind++) {
        ranks_check(3, body_skipped_and_left, &kind);
    }
    for (int n = 2; n <= 3; n++) {
        ranks_check(n, body_skipped_and_told, NULL);
        for (int skipper = 0; skipper < n; skipper++) {
            ranks_check(n, body_skipped_and_failed, &skipper);
        }
    }
    ranks_check(4, body_told, NULL);
    ranks_check(4, body_retold, NULL);
    ranks_check(3, body_told_accuses, NULL);
    for (travel kind = MAPPED; kind <= WATCHED; kind++) {
        ranks_check(3, body_two_skip, &kind);
        ranks_check(3, body_own_words, &kind);
    }
    ranks_check(3, body_left_behind, NULL);
    ranks_check(2, body_found_late, NULL);
    ranks_check(2, body_damaged_sentence, NULL);
    for (int n = 1; n <= 3; n++) {
        ranks_check(n, body_words, NULL);
    }
    return check_result();
}

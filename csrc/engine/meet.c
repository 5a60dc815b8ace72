/* Before a collective of messages its ranks meet: who is about to make another one, or none, is
 * named, and nothing is begun that would hang or end a process. See [Note: out of step]. */
#include "engine/domain_private.h"

#include <stdio.h>
#include <string.h>

#define COUNT_BITS 20
#define BACKWARDS_MAX UINT64_C(255)

/* A meeting is known by its phase and its number there, so that ranks that were apart count alike
 * again from the next phase on. */
static uint64_t next_meeting(const fc_domain *domain)
{
    const uint64_t backward = phase_of(domain->clock) & PHASE_MASK;
    const uint64_t phase =
        (domain->clock >> STEP_SHIFT) << 8 | (backward < BACKWARDS_MAX ? backward : BACKWARDS_MAX);

    return domain->n_met >> COUNT_BITS == phase ? domain->n_met + 1 : (phase << COUNT_BITS) + 1;
}

static const char *const operations[] = {"all-gather", "reduce-scatter", "all-reduce"};
#define N_OPERATIONS (sizeof(operations) / sizeof(operations[0]))

/* In one word that all ranks must have alike: the unit, how many, the operation, and a fingerprint
 * of the gradients that take part. */
#define UNIT_SHIFT 44
#define N_UNITS_SHIFT 34
#define N_UNITS_MASK UINT64_C(0x3ff)
#define KIND_SHIFT 32
#define DETAIL_MASK UINT64_C(0xffffffff)

static uint64_t what_of(const fc_unit *unit, size_t n_units, const char *op, uint64_t detail)
{
    uint64_t kind = 0;

    while (strcmp(operations[kind], op) != 0) {
        kind++;
    }
    return (uint64_t)unit->index << UNIT_SHIFT | (n_units & N_UNITS_MASK) << N_UNITS_SHIFT |
           kind << KIND_SHIFT | (detail & DETAIL_MASK);
}

static const char *operation_of(uint64_t what)
{
    const size_t kind = (size_t)(what >> KIND_SHIFT & 3);

    return kind < N_OPERATIONS ? operations[kind] : "?";
}

/* The word may be a peer's: whatever it is, nothing is read that is not there. */
static void describe(const fc_domain *domain, uint64_t what, char *out, size_t bytes)
{
    const size_t unit = (size_t)(what >> UNIT_SHIFT);
    const size_t n = (size_t)(what >> N_UNITS_SHIFT & N_UNITS_MASK);

    (void)snprintf(out, bytes, "the %s of unit %s", operation_of(what),
                   unit < domain->n_units ? domain->units[unit].name : "?");
    if (n > 1) {
        const size_t used = strlen(out);

        (void)snprintf(out + used, bytes - used, " and %zu more", n - 1);
    }
}

typedef struct meeting {
    fc_unit *unit;
    int peer;
    uint64_t number, what;
} meeting;

static bool has_come_or_gone(void *arg)
{
    const meeting *m = arg;
    fc_domain *domain = m->unit->domain;
    const clock_line *line = domain_clock(domain, m->peer);

    return fc_word_load(&line->met) >= m->number ||
           phase_of(fc_word_load(&line->clock)) > phase_of(domain->clock) ||
           domain_has_failed(domain, m->peer) || apart_find_accused(domain).in != NULL;
}

#define ADVICE                                                                                     \
    "over a process group all ranks call the same units in the same order, with the same "         \
    "set_requires_gradient_sync(), and each with gradients "                                       \
    "(set_reduce_scatter_unused_params(True) where they use different parameters)"
#define WHAT_BYTES 160

static fc_status fail_other(const meeting *m, uint64_t theirs)
{
    fc_domain *domain = m->unit->domain;
    char here[WHAT_BYTES], there[WHAT_BYTES], text[REASON_BYTES];
    /* The lower rank first, so that both say the same. */
    const bool is_first = domain->rank < m->peer;
    const int first = is_first ? domain->rank : m->peer, second = is_first ? m->peer : domain->rank;

    describe(domain, is_first ? m->what : theirs, here, sizeof(here));
    describe(domain, is_first ? theirs : m->what, there, sizeof(there));
    if (((m->what ^ theirs) & ~DETAIL_MASK) == 0) {
        (void)snprintf(text, sizeof(text),
                       "ranks %d and %d are in %s with gradients of different parameters (step "
                       "%llu): %s all ranks have gradients of the same ones; call "
                       "set_reduce_scatter_unused_params(True), or give each loss a part of all",
                       fc_transport_global_rank(domain->transport, first),
                       fc_transport_global_rank(domain->transport, second), here,
                       (unsigned long long)(domain->clock >> STEP_SHIFT),
                       domain->is_packed ? "over a process group" : "on a device");
        return apart_accuse(domain, m->peer, text);
    }
    (void)snprintf(text, sizeof(text), "rank %d is in %s and rank %d in %s (step %llu): " ADVICE,
                   fc_transport_global_rank(domain->transport, first), here,
                   fc_transport_global_rank(domain->transport, second), there,
                   (unsigned long long)(domain->clock >> STEP_SHIFT));
    return apart_accuse(domain, m->peer, text);
}

static fc_status fail_gone(const meeting *m)
{
    fc_domain *domain = m->unit->domain;
    char here[WHAT_BYTES], text[REASON_BYTES];

    describe(domain, m->what, here, sizeof(here));
    (void)snprintf(text, sizeof(text),
                   "rank %d has gone on without %s, which rank %d is in (step %llu): " ADVICE,
                   fc_transport_global_rank(domain->transport, m->peer), here,
                   fc_transport_global_rank(domain->transport, domain->rank),
                   (unsigned long long)(domain->clock >> STEP_SHIFT));
    return apart_accuse(domain, m->peer, text);
}

/* FC_ERR_* unless the peer is in the same meeting, or on its way there: FC_AGAIN then. */
static fc_status look_at(const meeting *m)
{
    fc_domain *domain = m->unit->domain;
    const clock_line *line = domain_clock(domain, m->peer);
    /* In this order: who has come goes on, whoever is accused meanwhile. */
    apart_accusation accused = apart_find_accused(domain);
    const bool is_past = phase_of(fc_word_load(&line->clock)) > phase_of(domain->clock);
    const uint64_t theirs = fc_word_load(&line->met);
    fc_status st;

    /* Who is one meeting ahead waits there, and has not written over this one's word yet. */
    if (theirs == m->number || theirs == m->number + 1) {
        const uint64_t what = fc_word_load(&line->what[m->number & 1]);

        return what == m->what ? FC_OK : fail_other(m, what);
    }
    if (accused.in != NULL) {
        return apart_admit(accused);
    }
    st = domain_check_peer(domain, m->peer, operation_of(m->what), m->unit->name);
    if (st != FC_OK) {
        accused = apart_find_accused(domain); /* because of which the peer may have left */
        return accused.in != NULL ? apart_admit(accused) : st;
    }
    /* Who has passed the phase over was found as it began. Or a third rank has accused this one,
     * and has gone on meanwhile: the peer is only late. */
    return is_past || theirs > m->number ? fail_gone(m) : FC_AGAIN;
}

static fc_status meet_peers(meeting *m)
{
    fc_domain *domain = m->unit->domain;
    const fc_wait_info info = {operation_of(m->what), m->unit->name, domain->clock >> STEP_SHIFT};
    const fc_wait_kind kind =
        (m->what >> KIND_SHIFT & 3) == 0 ? waits_gather_kind(domain) : FC_WAIT_REDUCE;
    fc_status st;

    for (m->peer = 0; m->peer < domain->n_ranks; m->peer++) {
        if (m->peer == domain->rank) {
            continue;
        }
        do {
            if (!has_come_or_gone(m)) {
                FC_TRY(waits_await(domain, m->unit, kind, m->peer, has_come_or_gone, m, &info));
            }
            st = look_at(m);
        } while (st == FC_AGAIN);
        FC_TRY(st);
    }
    return FC_OK;
}

fc_status meet(fc_unit *unit, size_t n_units, const char *op, uint64_t detail)
{
    fc_domain *domain = unit->domain;
    meeting m = {
        .unit = unit, .number = next_meeting(domain), .what = what_of(unit, n_units, op, detail)};
    apart_accusation accused;
    clock_line *own;

    if (domain->is_mapped || domain->n_ranks == 1 || domain->clock == CLOCK_LEFT) {
        return FC_OK;
    }
    if (domain->clocks == NULL) { /* what others look at has no collectives of our own */
        return domain->is_packed ? FC_OK : apart_exchange(unit);
    }
    FC_TRY(clock_ready(domain, unit));
    accused = apart_find_accused(domain);
    if (accused.in != NULL) { /* before peers see this rank come */
        return apart_admit(accused);
    }
    own = domain_clock(domain, domain->rank);
    domain->n_met = m.number;
    __atomic_store_n(&own->what[m.number & 1].value, m.what, __ATOMIC_RELEASE);
    fc_transport_publish(domain->watch, &own->met, m.number);
    return meet_peers(&m);
}

fc_status fc_domain_meet(fc_unit *unit, const char *op, uint64_t detail)
{
    return unit->domain->clocks != NULL ? meet(unit, 1, op, detail) : FC_OK;
}

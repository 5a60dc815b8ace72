/* The clock: phases of this rank, and waits for those of its peers. See [Note: the clock]. */
#include "engine/domain.h"

#include "engine/domain_private.h"
#include "engine/exchange.h"

#include <stdio.h>

static void set_clock(fc_domain *domain, uint64_t value)
{
    domain->clock = value;
    if (domain->clocks != NULL) {
        fc_transport_publish(domain->watch, &domain_clock(domain, domain->rank)->clock, value);
    }
}

bool fc_domain_is_open(const fc_domain *domain)
{
    return (domain->clock & STATE_MASK) == PHASE_OPEN;
}

bool fc_domain_in_backward(const fc_domain *domain)
{
    return fc_domain_is_open(domain) && (phase_of(domain->clock) & PHASE_MASK) != 0;
}

void fc_domain_open(fc_domain *domain, fc_opening opening)
{
    const bool is_backward = opening.phase == FC_PHASE_BACKWARD;
    uint64_t phase;

    if (fc_domain_is_open(domain)) {
        fc_domain_fail(domain);
    }
    reduction_forget_borrowed(domain);
    reduction_drop_begun(domain);
    fc_exchange_reset(domain);
    batch_drop(domain);
    order_turn(domain);
    phase = phase_of(domain->clock);
    domain->before = phase;
    if (domain->clocks != NULL) {
        __atomic_store_n(&domain_clock(domain, domain->rank)->before.value, phase,
                         __ATOMIC_RELEASE);
    }
    phase = is_backward ? phase + 1 : (phase | PHASE_MASK) + 1;
    domain->is_ready = domain->n_ranks == 1;
    domain->phases[is_backward]++;
    domain->clock = phase << PHASE_SHIFT;
    apart_begin(domain, &opening);
    set_clock(domain, domain->clock);
}

typedef struct clock_wait {
    fc_domain *domain;
    int peer;
    uint64_t target;
} clock_wait;

static bool clock_reached(void *arg)
{
    const clock_wait *wait = arg;

    return fc_word_load(&domain_clock(wait->domain, wait->peer)->clock) >= wait->target;
}

/* Over messages a forward ends without a wait for peers: one that leaves it by an exception does
 * not come to the backward behind it. If this rank has left it, too, a script stops forwards on
 * purpose.
 */
static bool has_left_forward(const fc_domain *domain, int peer)
{
    const uint64_t phase = phase_of(domain->clock), forward = phase & ~PHASE_MASK;

    return !domain->is_mapped && (phase & PHASE_MASK) != 0 &&
           fc_word_load(&domain_clock(domain, peer)->failed) == forward &&
           fc_word_load(&domain_clock(domain, domain->rank)->failed) != forward;
}

static bool reached_or_over(void *arg)
{
    const clock_wait *wait = arg;

    return clock_reached(arg) || apart_find_accused(wait->domain).in != NULL ||
           has_left_forward(wait->domain, wait->peer);
}

bool domain_has_failed(const fc_domain *domain, int peer)
{
    return clock_has_failed(domain_clock(domain, peer), phase_of(domain->clock));
}

static fc_status fail_left(fc_domain *domain, int peer, uint64_t phase, const char *op,
                           const char *unit)
{
    return fc_fail(
        FC_ERR_PEER,
        "rank %d left the %s of step %llu by an exception while rank %d was in %s%s%s; the "
        "gradients of this step are not complete",
        fc_transport_global_rank(domain->transport, peer),
        (phase & PHASE_MASK) != 0 ? "backward" : "forward",
        (unsigned long long)(domain->clock >> STEP_SHIFT),
        fc_transport_global_rank(domain->transport, domain->rank), op,
        unit != NULL ? " of unit " : "", unit != NULL ? unit : "");
}

fc_status domain_check_peer(fc_domain *domain, int peer, const char *op, const char *unit)
{
    if (!domain_has_failed(domain, peer)) {
        return FC_OK;
    }
    FC_TRY(apart_told_by(domain, peer));
    return fail_left(domain, peer, phase_of(domain->clock), op, unit);
}

/* In all domains of the root: a peer may ask in any of them. */
static void count_refused(fc_domain *domain)
{
    fc_domain *d = domain;

    do {
        if (d->is_mapped) {
            fc_word *refused = &domain_clock(d, d->rank)->refused;

            fc_transport_publish(d->transport, refused, fc_word_load(refused) + 1);
        }
        d->refused_in = phase_of(d->clock);
        d = d->next;
    } while (d != domain);
}

/* FC_ERR_PEER if `peer` has left the domain and never ended the phase that this rank is in. */
static fc_status check_present(fc_domain *domain, int peer, const char *op, const char *unit)
{
    const clock_line *line = domain_clock(domain, peer);

    if (fc_word_load(&line->clock) != CLOCK_LEFT ||
        fc_word_load(&line->completed) >= phase_of(domain->clock)) {
        return FC_OK;
    }
    if (domain->refused_in != phase_of(domain->clock)) {
        count_refused(domain);
    }
    return fc_fail(FC_ERR_PEER,
                   "rank %d has left the collectives of this model's units for others, and rank "
                   "%d waits for it in %s%s%s: hooks, collectives and replaced functions must be "
                   "set on all ranks",
                   fc_transport_global_rank(domain->transport, peer),
                   fc_transport_global_rank(domain->transport, domain->rank), op,
                   unit != NULL ? " of unit " : "", unit != NULL ? unit : "");
}

/* Waits until every peer's clock is at least `target`. A peer that has left the phase by an
 * exception is an error only at its end: until then this rank may be about to raise the same
 * exception. */
static fc_status await_clocks(fc_domain *domain, uint64_t target, const char *op, const fc_unit *of)
{
    const char *unit = of != NULL ? of->name : NULL;
    const fc_wait_info info = {op, unit, domain->clock >> STEP_SHIFT};
    int peer;

    for (peer = 0; peer < domain->n_ranks; peer++) {
        clock_wait wait = {domain, peer, target};

        if (peer == domain->rank) {
            continue;
        }
        while (!clock_reached(&wait) && !has_left_forward(domain, peer)) {
            apart_accusation accused = apart_find_accused(domain);

            if (accused.in != NULL) {
                return apart_admit(accused);
            }
            FC_TRY(waits_await(domain, of, waits_gather_kind(domain), peer, reached_or_over, &wait,
                               &info));
        }
        if (has_left_forward(domain, peer)) {
            apart_accusation accused =
                apart_find_accused(domain); /* because of which it may have left */

            return accused.in != NULL
                       ? apart_admit(accused)
                       : fail_left(domain, peer, phase_of(domain->clock) & ~PHASE_MASK, op, unit);
        }
        if (!fc_domain_is_open(domain)) {
            FC_TRY(domain_check_peer(domain, peer, op, unit));
        }
        FC_TRY(check_present(domain, peer, op, unit));
        FC_TRY(apart_check_opening(domain, peer, of));
    }
    return FC_OK;
}

fc_status fc_domain_ready(fc_domain *domain, const fc_unit *unit)
{
    /* Over messages ranks that gather nothing need not be alike. */
    return domain->is_mapped ? clock_ready(domain, unit) : FC_OK;
}

fc_status clock_ready(fc_domain *domain, const fc_unit *unit)
{
    if (domain->is_ready || domain->clock == CLOCK_LEFT) {
        return FC_OK;
    }
    FC_TRY(fc_transport_check(domain->watch));
    FC_TRY(await_clocks(domain, domain->clock & ~STATE_MASK, "all-gather", unit));
    for (int peer = 0; peer < domain->n_ranks; peer++) {
        if (peer != domain->rank) {
            FC_TRY(apart_check_read(domain, peer, unit));
        }
    }
    domain->is_ready = true;
    return FC_OK;
}

static bool turned_or_went_on(void *arg)
{
    const clock_wait *wait = arg;
    const clock_line *line = domain_clock(wait->domain, wait->peer);

    return fc_word_load(&line->turn) >= wait->target ||
           fc_word_load(&line->clock) > wait->domain->clock;
}

fc_status fc_domain_turn(fc_domain *domain, const fc_unit *unit)
{
    static const char *const op = "the gather of shards that were written within forward";
    const uint64_t step = domain->clock >> STEP_SHIFT;
    const fc_wait_info info = {op, unit->name, step};
    clock_wait wait = {.domain = domain, .target = step << STEP_SHIFT};
    fc_word *own;

    if (!domain->is_mapped || domain->n_ranks == 1) {
        return FC_OK;
    }
    own = &domain_clock(domain, domain->rank)->turn;
    wait.target = 1 + (fc_word_load(own) > wait.target ? fc_word_load(own) : wait.target);
    fc_transport_publish(domain->transport, own, wait.target);
    for (wait.peer = 0; wait.peer < domain->n_ranks; wait.peer++) {
        if (wait.peer == domain->rank) {
            continue;
        }
        FC_TRY(
            waits_await(domain, unit, FC_WAIT_FORWARD, wait.peer, turned_or_went_on, &wait, &info));
        if (fc_word_load(&domain_clock(domain, wait.peer)->turn) < wait.target) {
            FC_TRY(domain_check_peer(domain, wait.peer, op, unit->name));
            FC_TRY(check_present(domain, wait.peer, op, unit->name));
            return fc_fail(FC_ERR_PEER,
                           "shards of unit %s were written within a forward on rank %d and not on "
                           "rank %d: write them on all ranks alike, or between two forwards",
                           unit->name, fc_transport_global_rank(domain->transport, domain->rank),
                           fc_transport_global_rank(domain->transport, wait.peer));
        }
    }
    return FC_OK;
}

void fc_domain_mark_closed(fc_domain *domain)
{
    if (fc_domain_is_open(domain)) {
        set_clock(domain, domain->clock | PHASE_CLOSED);
    }
}

static void mark_completed(fc_domain *domain)
{
    __atomic_store_n(&domain_clock(domain, domain->rank)->completed.value, phase_of(domain->clock),
                     __ATOMIC_RELEASE);
}

fc_status fc_domain_close(fc_domain *domain)
{
    fc_status st;

    fc_domain_mark_closed(domain);
    if (domain->n_ranks == 1) {
        return FC_OK;
    }
    if (!domain->is_mapped) {
        if (domain->clocks != NULL) {
            mark_completed(domain);
        }
        return FC_OK;
    }
    st = await_clocks(domain, domain->clock,
                      (phase_of(domain->clock) & PHASE_MASK) != 0 ? "the end of backward"
                                                                  : "the end of forward",
                      NULL);
    if (st == FC_OK) {
        mark_completed(domain);
    }
    return st;
}

/* Over messages a rank that has closed its phase still has collectives in it, to whose meetings it
 * may not have come. */
static bool is_completed(const fc_domain *domain)
{
    return domain->is_mapped || domain->clocks == NULL ||
           fc_word_load(&domain_clock(domain, domain->rank)->completed) >= phase_of(domain->clock);
}

/* Before ranks have met in a forward, who failed it may still come: to its next one. Replicas meet
 * in none: they wait in the backward that does not come. */
static bool is_missed(const fc_domain *domain)
{
    return domain->is_ready || fc_domain_in_backward(domain) || domain->kind == FC_DOMAIN_REPLICATE;
}

/* Where ranks have a clock nobody waits in a collective to which a rank has not come, and the
 * transport counts no phases that ranks may have failed at different times. */
static void tell_transport(const fc_domain *domain)
{
    const fc_message_ops *messages = fc_transport_messages(domain->transport);

    if (messages != NULL && messages->fail_phase != NULL && domain->clocks == NULL) {
        messages->fail_phase(messages->context);
    }
}

void fc_domain_fail(fc_domain *domain)
{
    reduction_forget_borrowed(domain);
    if (!fc_domain_is_open(domain) && is_completed(domain)) {
        return;
    }
    batch_drop(domain);
    order_drop(domain);
    if (is_missed(domain)) {
        tell_transport(domain);
    }
    domain->n_left += domain->kind == FC_DOMAIN_REPLICATE;
    if (domain->clocks != NULL) {
        apart_tell(domain);
        fc_transport_publish(domain->watch, &domain_clock(domain, domain->rank)->failed,
                             phase_of(domain->clock));
    }
    set_clock(domain, domain->clock | PHASE_CLOSED);
}

void fc_domain_leave(fc_domain *domain)
{
    if (domain->clock == CLOCK_LEFT) {
        return;
    }
    fc_domain_fail(domain);
    domain->left_after = domain->clock;
    set_clock(domain, CLOCK_LEFT);
}

/* True when a call failed on the peer that this rank, which has left, has not joined: the n-th call
 * that is refused here stands beside the n-th there. A phase that merely failed says nothing. */
static bool goes_on(const fc_domain *domain, int peer)
{
    const clock_line *theirs = domain_clock(domain, peer);

    return fc_word_load(&theirs->clock) != CLOCK_LEFT &&
           fc_word_load(&theirs->refused) >
               fc_word_load(&domain_clock(domain, domain->rank)->refused);
}

static bool left_or_goes_on(void *arg)
{
    const clock_wait *wait = arg;

    return clock_reached(arg) || goes_on(wait->domain, wait->peer);
}

fc_status fc_domain_await_left(fc_domain *domain)
{
    const fc_wait_info info = {"the change of collectives", NULL, domain->left_after >> STEP_SHIFT};

    if (!domain->is_mapped) {
        return FC_OK;
    }
    for (int peer = 0; peer < domain->n_ranks; peer++) {
        clock_wait wait = {domain, peer, CLOCK_LEFT};

        if (peer == domain->rank) {
            continue;
        }
        FC_TRY(fc_transport_wait(domain->transport, peer, left_or_goes_on, &wait, &info));
        if (goes_on(domain, peer)) {
            count_refused(domain);
            return fc_fail(FC_ERR_PEER,
                           "rank %d has left the collectives of this model's units for others, "
                           "and rank %d goes on with them: hooks, collectives and replaced "
                           "functions must be set on all ranks",
                           fc_transport_global_rank(domain->transport, domain->rank),
                           fc_transport_global_rank(domain->transport, peer));
        }
    }
    return FC_OK;
}

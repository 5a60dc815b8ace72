/* Ranks out of step: what each did, found by the words beside the clock; see [Note: out of step].
 */
#include "engine/domain_private.h"

#include <stdio.h>
#include <string.h>

#define CAUSES                                                                                     \
    "usual causes, on one rank alone: a loss that was passed over (not finite), an out-of-memory " \
    "or other error that was caught, one more forward or backward (a metric, a log)"
#define CURE                                                                                       \
    "let all ranks decide alike, for instance by an all_reduce of the decision before backward()"

static int global(const fc_domain *domain, int rank)
{
    return fc_transport_global_rank(domain->transport, rank);
}

static const char *opener_name(const fc_domain *domain, uint64_t began)
{
    const size_t opener = (size_t)(began >> OPENER_SHIFT & OPENER_MAX);

    return opener < domain->n_openers ? domain->openers[opener] : "?";
}

/* ---- what a rank says ---- */

static void store(fc_word *word, uint64_t value)
{
    __atomic_store_n(&word->value, value, __ATOMIC_RELEASE);
}

/* What a phase begins with: the clock has its number, and is published after this. */
void apart_begin(fc_domain *domain, const fc_opening *opening)
{
    const uint64_t opener = opening->opener < OPENER_MAX ? opening->opener : OPENER_MAX;

    domain->verdict[0] = '\0';
    if (opening->phase != FC_PHASE_BACKWARD) {
        domain->began = domain->clock | opener << OPENER_SHIFT | (uint64_t)opening->phase;
        domain->updates = opening->updates;
    }
    if (domain->clocks != NULL) {
        clock_line *own = domain_clock(domain, domain->rank);
        const size_t slot = domain->clock >> STEP_SHIFT & 1;

        store(&own->began[slot], domain->began);
        store(&own->updates[slot], domain->updates);
    }
}

/* In all domains of the root: those that have gone past a phase may wait in any of them, and those
 * that go past it later look there. */
static void accuse_skippers(fc_domain *domain)
{
    fc_domain *d = domain;

    do {
        int accused = d->rank; /* nobody by name */

        d->admitted = phase_of(d->clock); /* this rank raises it now */
        apart_tell(d);
        for (int r = 0; d->clocks != NULL && r < d->n_ranks && accused == d->rank; r++) {
            accused = r != d->rank && apart_has_skipped(d, r) ? r : accused;
        }
        if (d->clocks != NULL) {
            fc_transport_publish(d->watch, &domain_clock(d, d->rank)->accused,
                                 phase_of(d->clock) << ACCUSED_SHIFT | (uint64_t)accused);
        }
        d = d->next;
    } while (d != domain);
}

/* Ends the phase in all domains of the root, since other ranks may wait in another one, and keeps
 * the sentence for them; returns it as an error. */
static fc_status fail(fc_domain *domain, fc_status status, const char *sentence)
{
    fc_domain *d = domain;

    (void)snprintf(domain->verdict, sizeof(domain->verdict), "%s", sentence);
    accuse_skippers(domain);
    do {
        fc_domain_fail(d);
        d = d->next;
    } while (d != domain);
    return fc_fail(status, "%s", sentence);
}

void apart_tell(fc_domain *domain)
{
    const fc_domain *d = domain;
    reason *own;

    while (d->verdict[0] == '\0' && d->next != domain) {
        d = d->next; /* another one of the root knows */
    }
    if (domain->clocks == NULL || d->verdict[0] == '\0') {
        return;
    }
    own = domain_reason(domain, domain->rank);
    if (own->phase != phase_of(domain->clock)) {
        __atomic_store_n(&own->phase, 0, __ATOMIC_SEQ_CST);
        memcpy(own->text, d->verdict, sizeof(own->text));
        __atomic_store_n(&own->phase, phase_of(domain->clock), __ATOMIC_RELEASE);
    }
}

/* What a peer said of `phase`; false if it says nothing of it, or no longer. */
static bool read_reason(const fc_domain *domain, int peer, uint64_t phase, char *out)
{
    reason *theirs = domain_reason(domain, peer);

    if (__atomic_load_n(&theirs->phase, __ATOMIC_ACQUIRE) != phase) {
        return false;
    }
    memcpy(out, theirs->text, REASON_BYTES);
    out[REASON_BYTES - 1] = '\0'; /* whatever a peer has written there */
    /* A write, of the same value, so that no read of the text comes after it. */
    return out[0] != '\0' && __atomic_fetch_add(&theirs->phase, 0, __ATOMIC_ACQ_REL) == phase;
}

fc_status apart_told_by(fc_domain *domain, int peer)
{
    char text[REASON_BYTES];

    if (!read_reason(domain, peer, phase_of(domain->clock), text)) {
        return FC_OK;
    }
    (void)snprintf(domain->verdict, sizeof(domain->verdict), "%s", text);
    accuse_skippers(domain);
    return fc_fail(FC_ERR_MISMATCH, "%s", text);
}

/* ---- how a step began ---- */

/* What is compared, of one rank. */
typedef struct start {
    uint64_t began, updates;
    int rank;
} start;

static fc_status fail_uses(fc_domain *domain, const start *mine, const start *theirs)
{
    static const char *const uses[] = {"a forward with gradients", "a forward without gradients",
                                       "unshard()", "?"};
    char text[REASON_BYTES];

    (void)snprintf(text, sizeof(text),
                   "step %llu is %s on rank %d and %s on rank %d: all ranks must use the model "
                   "alike (evaluate, and read full parameters, on all ranks or on none)",
                   (unsigned long long)(mine->began >> STEP_SHIFT), uses[mine->began & 3],
                   global(domain, mine->rank), uses[theirs->began & 3],
                   global(domain, theirs->rank));
    return fail(domain, FC_ERR_PEER, text);
}

static fc_status fail_openers(fc_domain *domain, const start *mine, const start *theirs)
{
    char text[REASON_BYTES];

    (void)snprintf(text, sizeof(text),
                   "ranks are out of step: step %llu begins in the forward of %s on rank %d, whose "
                   "shards have seen %llu optimizer steps, and of %s on rank %d (%llu steps). Call "
                   "the whole model on all ranks, or the same units in the same order; what only "
                   "some ranks run belongs inside the model's forward",
                   (unsigned long long)(mine->began >> STEP_SHIFT),
                   opener_name(domain, mine->began), global(domain, mine->rank),
                   (unsigned long long)mine->updates, opener_name(domain, theirs->began),
                   global(domain, theirs->rank), (unsigned long long)theirs->updates);
    return fail(domain, FC_ERR_MISMATCH, text);
}

static fc_status fail_updates(fc_domain *domain, const start *mine, const start *theirs,
                              const fc_unit *unit)
{
    char text[REASON_BYTES];

    (void)snprintf(
        text, sizeof(text),
        "ranks are out of step at unit %s: step %llu begins after %llu optimizer steps "
        "(and loads) over the shards of rank %d, and after %llu over those of rank %d; " CAUSES
        ", a step() that was left out or made twice; " CURE,
        unit != NULL ? unit->name : "(root)", (unsigned long long)(mine->began >> STEP_SHIFT),
        (unsigned long long)mine->updates, global(domain, mine->rank),
        (unsigned long long)theirs->updates, global(domain, theirs->rank));
    return fail(domain, FC_ERR_MISMATCH, text);
}

/* The lower rank is named first, so that both say the same. */
static fc_status compare(fc_domain *domain, const start *a, const start *b, const fc_unit *unit)
{
    const start *first = a->rank < b->rank ? a : b;
    const start *second = a->rank < b->rank ? b : a;
    const uint64_t kind = a->began & STATE_MASK;

    if (kind != (b->began & STATE_MASK)) {
        return fail_uses(domain, a, b);
    }
    if (kind == FC_PHASE_UNSHARD) {
        return FC_OK;
    }
    if ((a->began >> OPENER_SHIFT & OPENER_MAX) != (b->began >> OPENER_SHIFT & OPENER_MAX)) {
        return fail_openers(domain, first, second);
    }
    if (a->updates != b->updates && a->updates != FC_UPDATES_UNKNOWN &&
        b->updates != FC_UPDATES_UNKNOWN) {
        return fail_updates(domain, first, second, unit);
    }
    return FC_OK;
}

fc_status apart_check_opening(fc_domain *domain, int peer, const fc_unit *unit)
{
    const clock_line *line = domain_clock(domain, peer);
    const size_t slot = domain->clock >> STEP_SHIFT & 1;
    const start mine = {domain->began, domain->updates, domain->rank};
    const start theirs = {fc_word_load(&line->began[slot]), fc_word_load(&line->updates[slot]),
                          peer};

    /* A peer that goes ahead writes over what it was. */
    if (mine.began >> STEP_SHIFT != theirs.began >> STEP_SHIFT ||
        fc_word_load(&line->began[slot]) != theirs.began) {
        return FC_OK;
    }
    return compare(domain, &mine, &theirs, unit);
}

/* ---- phases that a rank has passed over ---- */

bool apart_has_skipped(const fc_domain *domain, int peer)
{
    const clock_line *line = domain_clock(domain, peer);
    const uint64_t theirs = fc_word_load(&line->clock);

    return theirs != CLOCK_LEFT && phase_of(theirs) > phase_of(domain->clock) &&
           fc_word_load(&line->before) < phase_of(domain->clock);
}

/* What a rank is in, by its clock. */
static const char *phase_name(uint64_t clock)
{
    return (phase_of(clock) & PHASE_MASK) != 0 ? "the backward" : "the forward";
}

fc_status apart_check_skipped(fc_domain *domain, int peer, const fc_unit *unit)
{
    const clock_line *line = domain_clock(domain, peer);
    const uint64_t theirs = fc_word_load(&line->clock);
    const uint64_t seen = fc_word_load(&line->updates[theirs >> STEP_SHIFT & 1]);
    const uint64_t backward = phase_of(domain->clock) & PHASE_MASK;
    char text[REASON_BYTES];
    char which[32] = "";

    if (!apart_has_skipped(domain, peer)) {
        return FC_OK;
    }
    if (backward > 1) {
        (void)snprintf(which, sizeof(which), " (number %llu of it)", (unsigned long long)backward);
    }
    (void)snprintf(text, sizeof(text),
                   "ranks are out of step at unit %s: rank %d went on to %s of step %llu without "
                   "%s of step %llu%s that rank %d is in; optimizer steps that their shards have "
                   "seen: %llu on rank %d, %llu on rank %d; " CAUSES "; " CURE,
                   unit != NULL ? unit->name : "(root)", global(domain, peer), phase_name(theirs),
                   (unsigned long long)(theirs >> STEP_SHIFT), phase_name(domain->clock),
                   (unsigned long long)(domain->clock >> STEP_SHIFT), which,
                   global(domain, domain->rank), (unsigned long long)seen, global(domain, peer),
                   (unsigned long long)domain->updates, global(domain, domain->rank));
    return apart_accuse(domain, peer, text);
}

fc_status apart_check_read(fc_domain *domain, int peer, const fc_unit *unit)
{
    const clock_line *line = domain_clock(domain, peer);
    const uint64_t theirs = fc_word_load(&line->clock);
    const bool is_unchanged =
        fc_word_load(&line->updates[theirs >> STEP_SHIFT & 1]) == domain->updates;

    return domain->is_mapped && is_unchanged ? FC_OK : apart_check_skipped(domain, peer, unit);
}

fc_status apart_accuse(fc_domain *domain, int peer, const char *sentence)
{
    const fc_status st = fail(domain, FC_ERR_MISMATCH, sentence);

    fc_transport_publish(domain->watch, &domain_clock(domain, domain->rank)->accused,
                         phase_of(domain->clock) << ACCUSED_SHIFT | (uint64_t)peer);
    return st;
}

fc_status apart_accuse_all(fc_domain *domain, const char *sentence)
{
    const fc_status st = fail(domain, FC_ERR_MISMATCH, sentence);
    fc_domain *d = domain;

    do {
        const fc_message_ops *messages = fc_transport_messages(d->transport);

        if (d->clocks != NULL) {
            fc_transport_publish(d->watch, &domain_clock(d, d->rank)->accused,
                                 phase_of(d->clock) << ACCUSED_SHIFT | ACCUSED_ALL);
        } else if (messages != NULL && messages->give_up != NULL) {
            messages->give_up(messages->context, sentence); /* nothing else is told between hosts */
        }
        d = d->next;
    } while (d != domain);
    return st;
}

/* True if this rank has left a phase by an exception: it did not pass that phase over. */
static bool has_failed_itself(const fc_domain *domain, uint64_t phase)
{
    return clock_has_failed(domain_clock(domain, domain->rank), phase);
}

/* True if `peer` has failed a phase because this rank had passed it over. Over messages whoever is
 * past that phase has, without the collective that the peer was in, unless it has failed it: then
 * to be told of that again would end the next phase, of which the peer would be told in turn. */
static bool is_accused(const fc_domain *domain, int peer)
{
    const clock_line *line = domain_clock(domain, peer);
    const uint64_t accused = fc_word_load(&line->accused);
    const uint64_t phase = accused >> ACCUSED_SHIFT, theirs = fc_word_load(&line->clock);
    const uint64_t mask = UINT64_MAX << ACCUSED_SHIFT;
    const uint64_t who = accused & ~mask;
    const bool is_named = who == ACCUSED_ALL || who == (uint64_t)domain->rank;
    const bool has_skipped = phase > domain->before;
    /* The peer is there still, or its model is gone since. */
    const bool is_last = theirs == CLOCK_LEFT ? phase >= domain->before : phase == phase_of(theirs);

    return is_last && phase < phase_of(domain->clock) && phase > domain->admitted &&
           (is_named || has_skipped || (!domain->is_mapped && !has_failed_itself(domain, phase)));
}

static int find_accuser(const fc_domain *domain)
{
    for (int r = 0; domain->clocks != NULL && r < domain->n_ranks; r++) {
        if (r != domain->rank && is_accused(domain, r)) {
            return r;
        }
    }
    return -1;
}

/* Over messages who is accused in one domain of the root comes to no collective of the others. */
apart_accusation apart_find_accused(fc_domain *domain)
{
    fc_domain *d = domain;

    do {
        const int peer = d == domain || !d->is_mapped ? find_accuser(d) : -1;

        if (peer >= 0) {
            return (apart_accusation){d, peer};
        }
        d = d->next;
    } while (d != domain && !domain->is_mapped);
    return (apart_accusation){NULL, -1};
}

/* The phase is the accusation's: the peer may have begun its next one by now. It is admitted in all
 * domains of the root, since the peer has said it in all of them. */
fc_status apart_admit(apart_accusation accusation)
{
    fc_domain *domain = accusation.in, *d = domain;
    const int peer = accusation.peer;
    const uint64_t phase = fc_word_load(&domain_clock(domain, peer)->accused) >> ACCUSED_SHIFT;
    char text[REASON_BYTES];

    do {
        d->admitted = phase;
        d = d->next;
    } while (d != domain);
    if (!read_reason(domain, peer, phase, text)) {
        return fc_fail(FC_ERR_MISMATCH,
                       "ranks are out of step: rank %d has ended a phase that rank %d passed over",
                       global(domain, peer), global(domain, domain->rank));
    }
    if (!domain->is_mapped) { /* peers that only see this rank leave are told why */
        (void)snprintf(domain->verdict, sizeof(domain->verdict), "%s", text);
    }
    return fc_fail(FC_ERR_MISMATCH, "%s", text);
}

/* ---- without a clock ---- */

/* What travels; of one size whatever the ranks are about to do. */
typedef struct word {
    uint64_t clock, began, updates, n_left, pad[4];
} word;

/* Of replicas, which do not meet in forward: gradients of one are of a step after the other's. */
static fc_status fail_left_alone(fc_unit *unit, const word *words, int first, int second)
{
    fc_domain *domain = unit->domain;
    char text[REASON_BYTES];

    (void)snprintf(text, sizeof(text),
                   "ranks are out of step at unit %s: since they met last rank %d has left %llu "
                   "forwards or backwards by exceptions, and rank %d %llu; " CURE,
                   unit->name, global(domain, first), (unsigned long long)words[first].n_left,
                   global(domain, second), (unsigned long long)words[second].n_left);
    return fail(domain, FC_ERR_MISMATCH, text);
}

static fc_status compare_words(fc_unit *unit, const word *words, int peer)
{
    fc_domain *domain = unit->domain;
    const word *a = &words[domain->rank], *b = &words[peer];
    const start mine = {a->began, a->updates, domain->rank};
    const start theirs = {b->began, b->updates, peer};
    const int first = domain->rank < peer ? domain->rank : peer;
    const int second = domain->rank < peer ? peer : domain->rank;
    char text[REASON_BYTES];

    if ((phase_of(a->clock) & PHASE_MASK) == (phase_of(b->clock) & PHASE_MASK)) {
        FC_TRY(compare(domain, &mine, &theirs, unit));
        return a->n_left == b->n_left ? FC_OK : fail_left_alone(unit, words, first, second);
    }
    a = &words[first]; /* so that both say the same */
    b = &words[second];
    (void)snprintf(text, sizeof(text),
                   "ranks are out of step at unit %s: rank %d is in %s of its step %llu and rank "
                   "%d in %s of its step %llu; optimizer steps that their shards have seen: %llu "
                   "on rank %d, %llu on rank %d; " CAUSES "; " CURE,
                   unit->name, global(domain, first), phase_name(a->clock),
                   (unsigned long long)(a->clock >> STEP_SHIFT), global(domain, second),
                   phase_name(b->clock), (unsigned long long)(b->clock >> STEP_SHIFT),
                   (unsigned long long)a->updates, global(domain, first),
                   (unsigned long long)b->updates, global(domain, second));
    return fail(domain, FC_ERR_MISMATCH, text);
}

/* That of an unshard is closed from its beginning on. */
static bool is_in_phase(const fc_domain *domain)
{
    return fc_domain_is_open(domain) || (domain->began & STATE_MASK) == FC_PHASE_UNSHARD;
}

fc_status apart_exchange(fc_unit *unit)
{
    fc_domain *domain = unit->domain;
    const fc_message_ops *messages = fc_transport_messages(domain->transport);
    const word mine = {domain->clock, domain->began, domain->updates, domain->n_left, {0}};
    word *words;
    bool has_met;
    fc_status st;

    if (domain->is_ready || domain->n_ranks == 1 || !is_in_phase(domain)) {
        return FC_OK;
    }
    words = fc_alloc((size_t)domain->n_ranks, sizeof(word));
    if (words == NULL) {
        return fc_fail(FC_ERR_NOMEM, "the words of %d ranks", domain->n_ranks);
    }
    st = messages->all_gather(messages->context, words, &mine, sizeof(mine));
    if (st == FC_ERR_GROUP) {
        st = fc_fail(st,
                     "what ranks tell each other before FSDP unit '%s' failed on rank %d of %d. A "
                     "rank may have ended, or be in another collective. The group says",
                     unit->name, domain->rank, domain->n_ranks);
    }
    has_met = st == FC_OK;
    for (int r = 0; st == FC_OK && r < domain->n_ranks; r++) {
        st = r != domain->rank ? compare_words(unit, words, r) : FC_OK;
    }
    fc_free(words);
    domain->is_ready = st == FC_OK;
    if (has_met) {
        domain->n_left = 0;
    }
    /* Also where they differ, which all find out: nobody is blamed for what ended before. */
    if (has_met && messages->open_phase != NULL) {
        messages->open_phase(messages->context);
    }
    return st;
}

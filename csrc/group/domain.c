/* Shared memory and clock of the units of one process group.
 *
 * Region: clock lines | lanes (rank major) | unsharded buffers | arenas (one per rank).
 */
#include "group/domain.h"

#include "group/domain_private.h"
#include "group/exchange.h"

#include <assert.h>
#include <string.h>

/* Reductions of units up to this size in all are never held up by a full arena. */
#define ARENA_SMALL_BYTES ((size_t)8 << 20)

static_assert(sizeof(fc_word) == 8 && sizeof(lane) == 40, "the lanes' layout is shared memory");

/* ---- set-up ---- */

static char *copy_text(const char *text)
{
    size_t bytes = strlen(text) + 1;
    char *copy = fc_alloc(1, bytes);

    if (copy != NULL) {
        memcpy(copy, text, bytes);
    }
    return copy;
}

static void unit_fini(fc_unit *unit)
{
    if (unit->drained != NULL) {
        exchange_drop_drained(unit, UINT64_MAX);
    }
    while (unit->spare != NULL) {
        drained *next = unit->spare->next;

        fc_free(unit->spare);
        unit->spare = next;
    }
    fc_free(unit->drained);
    fc_free(unit->mask);
    fc_free(unit->params);
    fc_free(unit->name);
}

static fc_status unit_init(fc_unit *unit, fc_domain *domain, const fc_unit_desc *desc,
                           int shard_rank, int n_shards)
{
    size_t words = (desc->n_params + 63) / 64;

    unit->domain = domain;
    unit->name = copy_text(desc->name);
    unit->params = fc_alloc(desc->n_params, sizeof(fc_param));
    unit->mask = fc_alloc(words, sizeof(uint64_t));
    unit->drained = fc_alloc((size_t)domain->n_ranks, sizeof(drained *));
    if (unit->name == NULL || unit->params == NULL || unit->mask == NULL || unit->drained == NULL) {
        return fc_fail(FC_ERR_NOMEM, "unit %s: %zu parameters", desc->name, desc->n_params);
    }
    if (desc->n_params > 0) {
        memcpy(unit->params, desc->params, desc->n_params * sizeof(fc_param));
    }
    return fc_layout_init(&unit->layout, unit->params, desc->n_params, shard_rank, n_shards,
                          domain->is_mapped);
}

/* Copies of a part that one post stages: one for each receiver, or one for all. */
static size_t copies_staged(const fc_domain *domain)
{
    return domain->kind == FC_DOMAIN_SHARD ? (size_t)domain->n_ranks : 1;
}

/* Between shards: two of the largest reductions, or all of them if they are small; any single one
 * must fit. Between replicas: all of them. A rank that waited for room there, while its shard group
 * waits for it and the replica's group for the replica, could close a circle of waits. */
static size_t arena_bytes_needed(const fc_domain *domain)
{
    size_t i, largest = 0, any = 0, sum = 0;

    if (domain->n_ranks == 1) {
        return 0;
    }
    for (i = 0; i < domain->n_units; i++) {
        size_t usual = copies_staged(domain) * domain->units[i].layout.trainable_part_bytes;
        size_t most = copies_staged(domain) * domain->units[i].layout.part_bytes;

        largest = usual > largest ? usual : largest;
        any = most > any ? most : any;
        sum += fc_round_up(usual, FC_ALIGN);
    }
    if (domain->kind == FC_DOMAIN_SHARD) {
        sum = sum < ARENA_SMALL_BYTES ? sum : ARENA_SMALL_BYTES;
    }
    largest = 2 * largest > sum ? 2 * largest : sum;
    return fc_round_up(largest > any ? largest : any, FC_PAGE);
}

/* Decides where everything lies; returns the bytes of it all. */
static size_t lay_out(fc_domain *domain)
{
    size_t i, at, words = 1;

    for (i = 0; i < domain->n_units; i++) {
        words =
            domain->units[i].layout.mask_words > words ? domain->units[i].layout.mask_words : words;
    }
    domain->lanes_at = (size_t)domain->n_ranks * FC_CACHE_LINE;
    domain->lane_bytes = fc_round_up(
        sizeof(lane) + ((size_t)domain->n_ranks + words) * sizeof(uint64_t), FC_CACHE_LINE);
    at = fc_round_up(
        domain->lanes_at + (size_t)domain->n_ranks * domain->n_units * domain->lane_bytes, FC_PAGE);
    for (i = 0; i < domain->n_units; i++) {
        domain->units[i].full_at = at;
        at += domain->kind == FC_DOMAIN_SHARD ? domain->units[i].layout.full_bytes : 0;
    }
    domain->arenas_at = at;
    domain->arena_bytes = arena_bytes_needed(domain);
    return at + (size_t)domain->n_ranks * domain->arena_bytes;
}

/* Collective. */
static fc_status map(fc_domain *domain)
{
    uint64_t print = (uint64_t)domain->kind;

    for (size_t i = 0; i < domain->n_units; i++) {
        print = fc_fingerprint(print, domain->units[i].layout.fingerprint);
    }
    return fc_transport_map_region(domain->transport,
                                   domain->n_units > 0 ? domain->units[0].name : "",
                                   lay_out(domain), print, &domain->region);
}

/* Units, and what a domain has without a transport. */
static fc_status build(fc_domain *domain, const fc_unit_desc *units, size_t n_units, int shard_rank,
                       int n_shards)
{
    domain->next = domain;
    domain->ring_capacity = n_units + 1;
    domain->units = fc_alloc(n_units, sizeof(fc_unit));
    domain->ring = fc_alloc(domain->ring_capacity, sizeof(ring_entry));
    if (domain->units == NULL || domain->ring == NULL) {
        return fc_fail(FC_ERR_NOMEM, "domain of %zu units", n_units);
    }
    for (size_t i = 0; i < n_units; i++) {
        domain->n_units = i + 1;
        domain->units[i].index = i;
        FC_TRY(unit_init(&domain->units[i], domain, &units[i], shard_rank, n_shards));
    }
    return waits_init(domain);
}

static size_t larger(size_t a, size_t b)
{
    return a > b ? a : b;
}

fc_domain_sizes fc_domain_measure(const fc_domain *domain)
{
    fc_domain_sizes sizes = {0};

    for (size_t i = 0; i < domain->n_units; i++) {
        const fc_layout *layout = &domain->units[i].layout;

        sizes.grads += fc_round_up(layout->trainable_grad_bytes, FC_PAGE);
        sizes.largest = larger(layout->full_bytes, sizes.largest);
        sizes.pack = larger(layout->pack_bytes + BATCH_NOTE_BYTES, sizes.pack);
        sizes.part = larger(layout->part_bytes, sizes.part);
        sizes.parts += layout->trainable_part_bytes > 0 ? layout->part_bytes : 0;
        sizes.small += order_is_small(&domain->units[i]) ? layout->full_bytes : 0;
        if (!domain->is_mapped || domain->kind != FC_DOMAIN_SHARD) {
            continue;
        }
        sizes.full += layout->full_bytes;
        for (size_t k = 0; k < layout->n_params; k++) {
            const fc_param *p = &layout->params[k];

            sizes.aliased += p->is_aliased ? p->chunk_numel * fc_dtype_bytes(p->orig) : 0;
        }
    }
    if (domain->is_mapped) {
        sizes.control = fc_round_up(domain->lanes_at + (size_t)domain->n_ranks * domain->n_units *
                                                           domain->lane_bytes,
                                    FC_PAGE);
        sizes.arena = domain->arena_bytes;
    }
    return sizes;
}

fc_status fc_domain_plan(fc_domain_kind kind, const fc_unit_desc *units, size_t n_units,
                         int n_shards, int n_ranks, bool is_mapped, fc_domain_sizes *out)
{
    fc_domain *domain = fc_alloc(1, sizeof(*domain));
    fc_status st;

    if (domain == NULL) {
        return fc_fail(FC_ERR_NOMEM, "plan of %zu units", n_units);
    }
    domain->kind = kind;
    domain->n_ranks = n_ranks;
    domain->is_mapped = is_mapped;
    st = build(domain, units, n_units, 0, n_shards);
    if (st == FC_OK) {
        if (is_mapped) {
            (void)lay_out(domain);
        }
        *out = fc_domain_measure(domain);
    }
    fc_domain_destroy(domain);
    return st;
}

size_t fc_domain_trim(fc_domain *domain)
{
    for (size_t i = 0; i < domain->n_units; i++) {
        fc_unit *unit = &domain->units[i];

        while (unit->spare != NULL) {
            drained *next = unit->spare->next;

            fc_free(unit->spare);
            unit->spare = next;
        }
    }
    batch_trim(domain);
    if (domain->region == NULL) {
        return 0;
    }
    exchange_reclaim(domain);
    if (domain->oldest != domain->newest) {
        return 0;
    }
    fc_region_give_back(domain->region,
                        domain->arenas_at + (size_t)domain->rank * domain->arena_bytes,
                        domain->arena_bytes);
    return domain->arena_bytes;
}

static void unlink_from_ring(fc_domain *domain)
{
    fc_domain *before = domain;

    while (before->next != domain) {
        before = before->next;
    }
    before->next = domain->next;
    domain->next = domain;
}

void fc_domain_link(fc_domain *const *domains, size_t n_domains)
{
    for (size_t i = 0; i < n_domains; i++) {
        unlink_from_ring(domains[i]);
        if (i > 0) {
            domains[i]->next = domains[0]->next;
            domains[0]->next = domains[i];
        }
    }
}

static const char *first_name(const fc_unit_desc *units, size_t n_units)
{
    return n_units > 0 ? units[0].name : "";
}

fc_status fc_domain_create(fc_transport *transport, fc_domain_kind kind, const fc_unit_desc *units,
                           size_t n_units, int shard_rank, int n_shards, fc_domain **out)
{
    bool is_mapped = fc_transport_is_mapped(transport);
    fc_domain *domain;
    fc_status st;

    if (fc_transport_n_ranks(transport) > FC_MAX_RANKS) {
        return fc_fail(FC_ERR_UNSUPPORTED,
                       "process group %s has %d ranks; at most %d are supported",
                       fc_transport_name(transport), fc_transport_n_ranks(transport), FC_MAX_RANKS);
    }
    FC_TRY(fc_transport_check(transport));
    domain = fc_alloc(1, sizeof(*domain));
    if (domain == NULL) {
        st = fc_fail(FC_ERR_NOMEM, "domain of %zu units", n_units);
    } else {
        domain->transport = transport;
        domain->kind = kind;
        domain->rank = fc_transport_rank(transport);
        domain->n_ranks = fc_transport_n_ranks(transport);
        domain->is_mapped = is_mapped;
        domain->clock = (uint64_t)PHASE_CLOSED;
        st = build(domain, units, n_units, shard_rank, n_shards);
    }
    if (is_mapped) {
        /* A rank that has failed tells the others, who would wait for it in the mapping. */
        st = st == FC_OK ? map(domain)
                         : fc_transport_refuse_region(transport, first_name(units, n_units), st);
    }
    if (st != FC_OK) {
        fc_domain_destroy(domain);
        return st;
    }
    *out = domain;
    return FC_OK;
}

void fc_domain_destroy(fc_domain *domain)
{
    size_t i;

    if (domain == NULL) {
        return;
    }
    if (domain->next != NULL) {
        unlink_from_ring(domain);
    }
    batch_trim(domain);
    order_fini(domain);
    for (i = 0; i < domain->n_units; i++) {
        unit_fini(&domain->units[i]);
    }
    if (domain->region != NULL) {
        fc_region_release(domain->region);
    }
    fc_free(domain->waits);
    fc_free(domain->wait_ns);
    fc_free(domain->units);
    fc_free(domain->ring);
    fc_free(domain);
}

fc_unit *fc_domain_unit(fc_domain *domain, size_t index)
{
    return &domain->units[index];
}

size_t fc_domain_n_units(const fc_domain *domain)
{
    return domain->n_units;
}

fc_transport *fc_domain_transport(fc_domain *domain)
{
    return domain->transport;
}

bool fc_domain_is_mapped(const fc_domain *domain)
{
    return domain->is_mapped;
}

bool fc_domain_is_replicate(const fc_domain *domain)
{
    return domain->kind == FC_DOMAIN_REPLICATE;
}

int fc_domain_rank(const fc_domain *domain)
{
    return domain->rank;
}

int fc_domain_n_ranks(const fc_domain *domain)
{
    return domain->n_ranks;
}

size_t fc_domain_region_bytes(const fc_domain *domain)
{
    return domain->region != NULL ? domain->region->bytes : 0;
}

size_t fc_domain_arena_bytes(const fc_domain *domain)
{
    return domain->arena_bytes;
}

/* ---- the clock ---- */

static void set_clock(fc_domain *domain, uint64_t value)
{
    domain->clock = value;
    if (domain->is_mapped) {
        fc_transport_publish(domain->transport, &domain_clock(domain, domain->rank)->clock, value);
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

static fc_word *began_word(const fc_domain *domain, int rank)
{
    return &domain_clock(domain, rank)->began[domain->clock >> STEP_SHIFT & 1];
}

void fc_domain_open(fc_domain *domain, fc_phase kind)
{
    const bool is_backward = kind == FC_PHASE_BACKWARD;
    uint64_t phase;

    if (fc_domain_is_open(domain)) {
        fc_domain_fail(domain);
    }
    fc_exchange_reset(domain);
    batch_drop(domain);
    order_turn(domain);
    phase = phase_of(domain->clock);
    phase = is_backward ? phase + 1 : (phase | PHASE_MASK) + 1;
    domain->is_ready = domain->n_ranks == 1;
    domain->phases[is_backward]++;
    domain->clock = phase << PHASE_SHIFT;
    if (!is_backward && domain->is_mapped) {
        __atomic_store_n(&began_word(domain, domain->rank)->value, domain->clock | kind,
                         __ATOMIC_RELEASE);
    }
    set_clock(domain, domain->clock);
}

typedef struct clock_wait {
    const fc_domain *domain;
    int peer;
    uint64_t target;
} clock_wait;

static bool clock_reached(void *arg)
{
    const clock_wait *wait = arg;

    return fc_word_load(&domain_clock(wait->domain, wait->peer)->clock) >= wait->target;
}

bool domain_has_failed(const fc_domain *domain, int peer)
{
    const clock_line *line = domain_clock(domain, peer);
    uint64_t phase = phase_of(domain->clock);

    /* In this order: who completed this phase before it failed a later one did nothing wrong here.
     */
    return fc_word_load(&line->failed) >= phase && fc_word_load(&line->completed) < phase;
}

fc_status domain_check_peer(const fc_domain *domain, int peer, const char *op, const char *unit)
{
    if (!domain_has_failed(domain, peer)) {
        return FC_OK;
    }
    return fc_fail(
        FC_ERR_PEER,
        "rank %d left the %s of step %llu by an exception while rank %d was in %s%s%s; the "
        "gradients of this step are not complete",
        fc_transport_global_rank(domain->transport, peer),
        (phase_of(domain->clock) & PHASE_MASK) != 0 ? "backward" : "forward",
        (unsigned long long)(domain->clock >> STEP_SHIFT),
        fc_transport_global_rank(domain->transport, domain->rank), op,
        unit != NULL ? " of unit " : "", unit != NULL ? unit : "");
}

/* In all domains of the tree: a peer may ask in any of them. */
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
                   "rank %d no longer runs this model on the core, and rank %d waits for it in "
                   "%s%s%s: hooks, collectives or replaced functions that only torch's "
                   "implementation has must be set on all ranks",
                   fc_transport_global_rank(domain->transport, peer),
                   fc_transport_global_rank(domain->transport, domain->rank), op,
                   unit != NULL ? " of unit " : "", unit != NULL ? unit : "");
}

/* FC_ERR_PEER if `peer` began this step for something else: evaluation on one rank, say, would
 * otherwise be taken for the other's training, and all later steps for the ones before them. */
static fc_status check_same_use(const fc_domain *domain, int peer)
{
    static const char *const uses[] = {"a forward with gradients", "a forward without gradients",
                                       "unshard()"};
    const uint64_t mine = fc_word_load(began_word(domain, domain->rank));
    const uint64_t theirs = fc_word_load(began_word(domain, peer));

    if (mine == theirs || mine >> STEP_SHIFT != theirs >> STEP_SHIFT) {
        return FC_OK;
    }
    return fc_fail(FC_ERR_PEER,
                   "step %llu is %s on rank %d and %s on rank %d: all ranks must use the model "
                   "alike (evaluate, and read full parameters, on all ranks or on none)",
                   (unsigned long long)(mine >> STEP_SHIFT), uses[mine & PHASE_MASK],
                   fc_transport_global_rank(domain->transport, domain->rank),
                   uses[theirs & PHASE_MASK], fc_transport_global_rank(domain->transport, peer));
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
        if (!clock_reached(&wait)) {
            FC_TRY(waits_await(domain, of, waits_gather_kind(domain), peer, clock_reached, &wait,
                               &info));
        }
        if (!fc_domain_is_open(domain)) {
            FC_TRY(domain_check_peer(domain, peer, op, unit));
        }
        FC_TRY(check_present(domain, peer, op, unit));
        FC_TRY(check_same_use(domain, peer));
    }
    return FC_OK;
}

fc_status fc_domain_ready(fc_domain *domain, const fc_unit *unit)
{
    if (domain->is_ready || !domain->is_mapped) {
        return FC_OK;
    }
    FC_TRY(fc_transport_check(domain->transport));
    FC_TRY(await_clocks(domain, domain->clock & ~STATE_MASK, "all-gather", unit));
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
    clock_wait wait = {domain, 0, step << STEP_SHIFT};
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

fc_status fc_domain_close(fc_domain *domain)
{
    fc_status st;

    fc_domain_mark_closed(domain);
    if (!domain->is_mapped || domain->n_ranks == 1) {
        return FC_OK;
    }
    st = await_clocks(domain, domain->clock,
                      (phase_of(domain->clock) & PHASE_MASK) != 0 ? "the end of backward"
                                                                  : "the end of forward",
                      NULL);
    if (st == FC_OK) {
        __atomic_store_n(&domain_clock(domain, domain->rank)->completed.value,
                         phase_of(domain->clock), __ATOMIC_RELEASE);
        exchange_reclaim(domain);
    }
    return st;
}

void fc_domain_fail(fc_domain *domain)
{
    if (!fc_domain_is_open(domain)) {
        return;
    }
    batch_drop(domain);
    if (domain->is_mapped) {
        fc_transport_publish(domain->transport, &domain_clock(domain, domain->rank)->failed,
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
    const fc_wait_info info = {"the change to torch's implementation", NULL,
                               domain->left_after >> STEP_SHIFT};

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
                           "rank %d no longer runs this model on the core, and rank %d does: "
                           "hooks, collectives or replaced functions that only torch's "
                           "implementation has must be set on all ranks",
                           fc_transport_global_rank(domain->transport, domain->rank),
                           fc_transport_global_rank(domain->transport, peer));
        }
    }
    return FC_OK;
}

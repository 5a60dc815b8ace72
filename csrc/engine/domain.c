/* Shared memory and clock of the units of one process group.
 *
 * Region: clock lines | reasons | lanes (rank major) | unsharded buffers | arenas (one per rank).
 */
#include "engine/domain.h"

#include "engine/domain_private.h"
#include "engine/exchange.h"
#include "window/window.h"

#include <assert.h>
#include <string.h>

/* Reductions of units up to this size in all are never held up by a full arena. */
#define ARENA_SMALL_BYTES ((size_t)8 << 20)

static_assert(sizeof(fc_word) == 8 && sizeof(lane) == 40, "the lanes' layout is shared memory");
static_assert(sizeof(clock_line) <= FC_CACHE_LINE, "written by one rank alone");

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
    if (unit->spilled != NULL) {
        exchange_drop_spilled(unit, UINT64_MAX);
    }
    while (unit->spare != NULL) {
        spilled *next = unit->spare->next;

        fc_free(unit->spare);
        unit->spare = next;
    }
    fc_free(unit->spilled);
    fc_free(unit->mask);
    fc_free(unit->params);
    fc_free(unit->name);
}

static fc_status unit_init(fc_unit *unit, fc_domain *domain, const fc_unit_desc *desc,
                           int shard_rank, int n_shards)
{
    const size_t words = (desc->n_params + 63) / 64;
    const size_t n_entries = fc_layout_count(desc->params, desc->n_params);

    unit->domain = domain;
    unit->name = copy_text(desc->name);
    unit->params = fc_alloc(n_entries, sizeof(fc_param));
    unit->mask = fc_alloc(words, sizeof(uint64_t));
    unit->spilled = fc_alloc((size_t)domain->n_ranks, sizeof(spilled *));
    if (unit->name == NULL || unit->params == NULL || unit->mask == NULL || unit->spilled == NULL) {
        return fc_fail(FC_ERR_NOMEM, "unit %s: %zu parameters", desc->name, desc->n_params);
    }
    if (desc->n_params > 0) {
        memcpy(unit->params, desc->params, n_entries * sizeof(fc_param));
    }
    domain->is_packed = domain->is_packed || (desc->n_params > 0 && desc->params[0].is_packed);
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
static size_t arena_bytes_needed(const fc_domain *domain, size_t *spare_out)
{
    size_t i, largest = 0, any = 0, sum = 0, spare = 0;

    *spare_out = 0;
    if (domain->n_ranks == 1) {
        return 0;
    }
    for (i = 0; i < domain->n_units; i++) {
        size_t usual = copies_staged(domain) * domain->units[i].layout.trainable_part_bytes;
        size_t most = copies_staged(domain) * domain->units[i].layout.part_bytes;

        largest = usual > largest ? usual : largest;
        any = most > any ? most : any;
        sum += fc_round_up(usual, FC_ALIGN);
        spare += fc_round_up(most, FC_ALIGN);
    }
    *spare_out = fc_round_up(spare, FC_PAGE);
    if (domain->kind == FC_DOMAIN_SHARD) {
        sum = sum < ARENA_SMALL_BYTES ? sum : ARENA_SMALL_BYTES;
    }
    largest = 2 * largest > sum ? 2 * largest : sum;
    return fc_round_up(largest > any ? largest : any, FC_PAGE);
}

/* Decides where everything lies; returns the bytes of it all but the spare arenas. */
static size_t lay_out(fc_domain *domain)
{
    size_t i, at, words = 1;

    for (i = 0; i < domain->n_units; i++) {
        words =
            domain->units[i].layout.mask_words > words ? domain->units[i].layout.mask_words : words;
    }
    domain->lanes_at = fc_round_up(clocks_bytes(domain->n_ranks), FC_CACHE_LINE);
    domain->lane_bytes = fc_round_up(
        sizeof(lane) + ((size_t)domain->n_ranks + words) * sizeof(uint64_t), FC_CACHE_LINE);
    at = fc_round_up(
        domain->lanes_at + (size_t)domain->n_ranks * domain->n_units * domain->lane_bytes, FC_PAGE);
    for (i = 0; i < domain->n_units; i++) {
        domain->units[i].full_at = at;
        at += domain->kind == FC_DOMAIN_SHARD ? domain->units[i].layout.full_bytes : 0;
    }
    domain->arenas_at = at;
    domain->arena_bytes = arena_bytes_needed(domain, &domain->spare_bytes);
    domain->spares_at = at + (size_t)domain->n_ranks * domain->arena_bytes;
    return domain->spares_at;
}

static const char *first_name(const fc_domain *domain)
{
    return domain->n_units > 0 ? domain->units[0].name : "";
}

static void drop_openers(fc_domain *domain)
{
    for (size_t i = 0; i < domain->n_openers; i++) {
        fc_free(domain->openers[i]);
    }
    fc_free(domain->openers);
    domain->openers = NULL;
    domain->n_openers = 0;
}

/* Collective. */
static fc_status map(fc_domain *domain)
{
    uint64_t print = (uint64_t)domain->kind;
    const size_t bytes = lay_out(domain);

    for (size_t i = 0; i < domain->n_units; i++) {
        print = fc_fingerprint(print, domain->units[i].layout.fingerprint);
    }
    FC_TRY(fc_transport_map_with_spare(domain->transport, first_name(domain), bytes,
                                       (size_t)domain->n_ranks * domain->spare_bytes, print,
                                       &domain->region));
    domain->clocks = domain->region->shared;
    domain->watch = domain->transport;
    return FC_OK;
}

fc_status fc_domain_watch(fc_domain *domain, fc_transport *watch)
{
    if (domain->is_mapped || domain->clocks != NULL || !fc_transport_is_mapped(watch)) {
        return fc_fail(FC_ERR_INVALID, "unit %s: its ranks need no other clock",
                       first_name(domain));
    }
    FC_TRY(fc_transport_map_region(watch, first_name(domain), clocks_bytes(domain->n_ranks),
                                   (uint64_t)domain->n_units, &domain->clock_region));
    domain->clocks = domain->clock_region->shared;
    domain->watch = watch;
    return FC_OK;
}

fc_status fc_domain_name_openers(fc_domain *domain, const char *const *names, size_t n_names)
{
    drop_openers(domain);
    domain->openers = fc_alloc(n_names, sizeof(char *));
    if (domain->openers == NULL) {
        return fc_fail(FC_ERR_NOMEM, "the names of %zu modules", n_names);
    }
    domain->n_openers = n_names;
    for (size_t i = 0; i < n_names; i++) {
        domain->openers[i] = copy_text(names[i]);
        if (domain->openers[i] == NULL) {
            return fc_fail(FC_ERR_NOMEM, "the name of module %s", names[i]);
        }
    }
    return FC_OK;
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
            spilled *next = unit->spare->next;

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

static void show_names(fc_domain *domain)
{
    for (size_t i = 0; i < domain->n_units; i++) {
        domain->units[i].shown_as = fc_window_name(domain->units[i].name);
    }
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
        show_names(domain);
    }
    if (is_mapped) {
        /* A rank that has failed tells the others, who would wait for it in the mapping. */
        st = st == FC_OK
                 ? map(domain)
                 : fc_transport_refuse_region(transport, n_units > 0 ? units[0].name : "", st);
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
    if (domain->clock_region != NULL) {
        fc_region_release(domain->clock_region);
    }
    drop_openers(domain);
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

bool fc_domain_is_packed(const fc_domain *domain)
{
    return domain->is_packed;
}

bool fc_domain_is_visible(const fc_domain *domain)
{
    return domain->is_packed && !domain->is_mapped;
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
    const fc_region *region = domain->is_mapped ? domain->region : domain->clock_region;

    return region != NULL ? region->bytes : 0;
}

size_t fc_domain_arena_bytes(const fc_domain *domain)
{
    return domain->arena_bytes;
}

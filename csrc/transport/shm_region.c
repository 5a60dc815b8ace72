/* Regions: memory that all ranks map, made in two agreements over the control segment. */
#include "transport/shm_impl.h"
#include "transport/shm_segment.h"

#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

#define WHAT_BYTES 64

typedef struct shm_region {
    fc_region region; /* first: callers hold its address */
    _Atomic int64_t n_references;
} shm_region;

typedef struct region_offer {
    fc_shm_outcome outcome;
    char what[WHAT_BYTES];
    uint64_t bytes;
    uint64_t fingerprint;
    fc_segment_id segment; /* of rank 0 */
} region_offer;

static_assert(sizeof(region_offer) <= FC_SHM_MAIL_BYTES, "travels as one mail");

typedef struct mail_wait {
    const fc_word *word;
    uint64_t sequence;
} mail_wait;

static bool has_mail(void *arg)
{
    const mail_wait *w = arg;

    return fc_word_load(w->word) >= w->sequence;
}

/* Two boxes per rank are enough: who writes number k + 2 has seen everybody's k + 1, which each
 * rank sends only after it has read all of k. */
fc_status fc_shm_exchange(fc_transport *transport, const char *what, const void *mine, size_t bytes,
                          void *all_out)
{
    uint64_t sequence = transport->shm->mail_sequence + 1;
    fc_shm_rank *own = fc_shm_rank_of(transport, transport->rank);
    fc_wait_info info = {.op = what, .sequence = sequence};

    assert(bytes <= FC_SHM_MAIL_BYTES);
    FC_TRY(fc_transport_check(transport));
    transport->shm->mail_sequence = sequence;
    memcpy(own->mail[sequence % 2], mine, bytes);
    fc_transport_publish(transport, &own->mail_sequence, sequence);
    for (int r = 0; r < transport->n_ranks; r++) {
        fc_shm_rank *peer = fc_shm_rank_of(transport, r);
        mail_wait w = {.word = &peer->mail_sequence, .sequence = sequence};
        fc_status st = fc_transport_wait(transport, r, has_mail, &w, &info);

        if (st != FC_OK) {
            /* Also after an interruption: this rank is out of step with its peers now. */
            return transport->broken == FC_OK ? fc_transport_abort(transport, st, fc_last_message())
                                              : st;
        }
        memcpy((char *)all_out + (size_t)r * bytes, peer->mail[sequence % 2], bytes);
    }
    return FC_OK;
}

/* The same sentence on all ranks: the first rank that differs from rank 0. */
static fc_status compare_offers(const fc_transport *t, region_offer *offers)
{
    for (int r = 0; r < t->n_ranks; r++) {
        offers[r].what[WHAT_BYTES - 1] = '\0';
        if (offers[r].bytes != offers[0].bytes || offers[r].fingerprint != offers[0].fingerprint ||
            strcmp(offers[r].what, offers[0].what) != 0) {
            return fc_fail(FC_ERR_MISMATCH,
                           "ranks disagree about shared memory: rank %d wants %s (%llu bytes, "
                           "layout %016llx), "
                           "rank %d wants %s (%llu bytes, layout %016llx)",
                           t->global_ranks[0], offers[0].what, (unsigned long long)offers[0].bytes,
                           (unsigned long long)offers[0].fingerprint, t->global_ranks[r],
                           offers[r].what, (unsigned long long)offers[r].bytes,
                           (unsigned long long)offers[r].fingerprint);
        }
    }
    return FC_OK;
}

static fc_status map_both(const fc_segment_id *id, fc_region *region)
{
    const size_t bytes = region->bytes, spare = region->spare;
    fc_status st;
    int fd;

    FC_TRY(fc_segment_open(id, &fd));
    st = fc_segment_map(fd, bytes, spare, false, &region->shared);
    if (st == FC_OK) {
        fc_account_add(FC_FOR_SHARED, (int64_t)bytes);
        st = fc_segment_map(fd, bytes, 0, true, &region->view);
    }
    fc_segment_close(fd);
    return st;
}

static void free_region(shm_region *r)
{
    if (r != NULL) {
        if (r->region.shared != NULL) {
            fc_account_add(FC_FOR_SHARED, -(int64_t)r->region.bytes);
        }
        fc_segment_unmap(r->region.view, r->region.bytes);
        fc_segment_unmap(r->region.shared, r->region.bytes + r->region.spare);
        fc_free(r);
    }
}

/* Both agreements. `region` is NULL when this rank had no memory for it, which its offer tells. */
static fc_status agree_on_region(fc_transport *t, const region_offer *mine, shm_region *region)
{
    void *answers = t->shm->mail_in;
    fc_segment_id segment;
    fc_shm_outcome outcome;

    FC_TRY(fc_shm_exchange(t, "set-up of shared memory", mine, sizeof(*mine), answers));
    /* Who has failed before may not know what it would have wanted. */
    FC_TRY(fc_shm_outcome_agree(t, mine->what, answers, sizeof(*mine)));
    FC_TRY(compare_offers(t, answers));
    segment = ((const region_offer *)answers)[0].segment;
    fc_shm_outcome_set(&outcome, t, map_both(&segment, &region->region));
    FC_TRY(fc_shm_exchange(t, "set-up of shared memory", &outcome, sizeof(outcome), answers));
    return fc_shm_outcome_agree(t, mine->what, answers, sizeof(outcome));
}

static shm_region *make_offer(fc_transport *t, const char *what, size_t bytes, size_t spare,
                              uint64_t fingerprint, region_offer *mine)
{
    shm_region *region = fc_alloc(1, sizeof(*region));
    fc_status st = FC_OK;

    memset(mine, 0, sizeof(*mine));
    (void)snprintf(mine->what, sizeof(mine->what), "%s", what);
    mine->bytes = bytes;
    mine->fingerprint = fingerprint;
    mine->segment.fd = -1;
    if (region == NULL) {
        st = fc_fail(FC_ERR_NOMEM, "%zu bytes", sizeof(*region));
    } else {
        region->region.bytes = bytes;
        region->region.spare = spare;
        atomic_init(&region->n_references, 1);
        if (t->rank == 0) {
            st = fc_segment_create(what, bytes, spare, t->n_ranks, &mine->segment);
        }
    }
    fc_shm_outcome_set(&mine->outcome, t, st);
    return region;
}

fc_status fc_transport_map_region(fc_transport *transport, const char *what, size_t bytes,
                                  uint64_t fingerprint, fc_region **out)
{
    return fc_transport_map_with_spare(transport, what, bytes, 0, fingerprint, out);
}

fc_status fc_transport_map_with_spare(fc_transport *transport, const char *what, size_t bytes,
                                      size_t spare, uint64_t fingerprint, fc_region **out)
{
    region_offer mine;
    shm_region *region;
    fc_status st;

    FC_TRY(fc_transport_check(transport));
    if (transport->shm == NULL) {
        return fc_fail(FC_ERR_UNSUPPORTED, "process group %s shares no memory", transport->name);
    }
    region = make_offer(transport, what, bytes, spare, fingerprint, &mine);
    st = agree_on_region(transport, &mine, region);
    fc_segment_close(mine.segment.fd);
    if (st != FC_OK) {
        free_region(region);
        return st;
    }
    *out = &region->region;
    return FC_OK;
}

fc_status fc_transport_refuse_region(fc_transport *transport, const char *what, fc_status status)
{
    region_offer mine;

    memset(&mine, 0, sizeof(mine));
    (void)snprintf(mine.what, sizeof(mine.what), "%s", what);
    fc_shm_outcome_set(&mine.outcome, transport, status);
    FC_TRY(fc_shm_exchange(transport, "set-up of shared memory", &mine, sizeof(mine),
                           transport->shm->mail_in));
    return fc_shm_outcome_agree(transport, what, transport->shm->mail_in, sizeof(mine));
}

void fc_region_retain(fc_region *region)
{
    atomic_fetch_add_explicit(&((shm_region *)region)->n_references, 1, memory_order_relaxed);
}

void fc_region_release(fc_region *region)
{
    shm_region *r = (shm_region *)region;

    /* Release and acquire: all uses of the memory come before it is unmapped. */
    if (r != NULL && atomic_fetch_sub_explicit(&r->n_references, 1, memory_order_acq_rel) == 1) {
        free_region(r);
    }
}

void fc_region_give_back(fc_region *region, size_t offset, size_t bytes)
{
    size_t begin = fc_round_up(offset, FC_PAGE);
    size_t end = (offset + bytes) / FC_PAGE * FC_PAGE;

    if (begin < end && end <= region->bytes + region->spare) {
        (void)madvise(region->shared + begin, end - begin, MADV_REMOVE);
    }
}

void fc_region_discard_writes(fc_region *region, size_t offset, size_t bytes)
{
    size_t begin = offset / FC_PAGE * FC_PAGE;
    size_t end;

    if (bytes == 0 || offset > region->bytes || bytes > region->bytes - offset) {
        return;
    }
    end = fc_round_up(offset + bytes, FC_PAGE);
    (void)madvise(region->view + begin, end - begin, MADV_DONTNEED);
}

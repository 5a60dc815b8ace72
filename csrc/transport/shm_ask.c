/* Where the peer is that a rank waits for: it is asked, and told apart from one that cannot come.
 */
#include "transport/shm_impl.h"

#include "base/clock.h"

#include <stdio.h>
#include <string.h>

#define FIRST_NS (FC_NS_PER_S / 2) /* most waits are over by then, and ask nothing */
#define AGAIN_NS FC_NS_PER_S
#define STUCK_NS FC_NS_PER_S
#define MUTUAL_NS (2 * FC_NS_PER_S)
#define TRIES 100

/* False: it is being written; the next look finds it. */
static bool read_answer(fc_shm_answer *answer, uint32_t question, fc_place *out)
{
    uint64_t words[FC_SHM_PLACE_WORDS];

    for (int i = 0; i < TRIES; i++) {
        uint32_t before = atomic_load_explicit(&answer->n_writes, memory_order_acquire);

        if ((int32_t)(atomic_load_explicit(&answer->answered, memory_order_acquire) - question) <
            0) {
            return false;
        }
        for (size_t w = 0; w < FC_SHM_PLACE_WORDS; w++) {
            words[w] = atomic_load_explicit(&answer->place[w], memory_order_acquire);
        }
        if (before % 2 == 0 &&
            before == atomic_load_explicit(&answer->n_writes, memory_order_relaxed)) {
            memcpy(out, words, sizeof(*out));
            out->text[sizeof(out->text) - 1] = '\0';
            return true;
        }
    }
    return false;
}

/* Whether the peer is in a collective that this rank has not called. Collectives of a group are
 * called in one order, so it cannot end before this rank calls it. */
static bool waits_for_us(const fc_transport *t, const fc_place *place)
{
    uint64_t mine;

    return place->group != 0 && t->host.count_collectives != NULL &&
           t->host.count_collectives(place->group, &mine) && place->sequence > mine;
}

static bool is_same(const fc_place *a, const fc_place *b)
{
    return a->group == b->group && a->sequence == b->sequence && strcmp(a->text, b->text) == 0;
}

/* A collective that is only slow, or is about to be called here, ends meanwhile. */
static bool judge(const fc_transport *t, fc_shm_inquiry *inquiry, const fc_place *answer,
                  int64_t now_ns)
{
    bool is_news = inquiry->stuck_ns == 0 || !is_same(answer, &inquiry->place);

    inquiry->place = *answer;
    if (!waits_for_us(t, answer)) {
        inquiry->stuck_ns = 0;
        return false;
    }
    if (is_news) {
        inquiry->stuck_ns = now_ns;
    }
    return now_ns - inquiry->stuck_ns >= STUCK_NS;
}

bool fc_shm_inquire(const fc_transport *transport, int peer, fc_shm_inquiry *inquiry,
                    int64_t waited_ns)
{
    fc_shm_rank *theirs = fc_shm_rank_of(transport, peer);
    int64_t now_ns = fc_now_ns();
    fc_place answer;

    if (waited_ns < FIRST_NS) {
        return false;
    }
    if (inquiry->question != 0 && !inquiry->is_answered) {
        if (!read_answer(&theirs->answer, inquiry->question, &answer)) {
            return false;
        }
        inquiry->is_answered = true;
        inquiry->at_ns = now_ns;
        return judge(transport, inquiry, &answer, now_ns);
    }
    if (inquiry->question == 0 || now_ns - inquiry->at_ns >= AGAIN_NS) {
        inquiry->question =
            1 + atomic_fetch_add_explicit(&theirs->n_asked, 1, memory_order_acq_rel);
        inquiry->question += inquiry->question == 0; /* after 2^32 of them */
        inquiry->is_answered = false;
        inquiry->at_ns = now_ns;
    }
    return false;
}

bool fc_shm_waits_for_us(const fc_transport *transport, int peer, fc_shm_inquiry *inquiry)
{
    const fc_shm_rank *theirs = fc_shm_rank_of(transport, peer);
    uint32_t looks = atomic_load_explicit(&theirs->patience.n_looks, memory_order_seq_cst);
    uint32_t wait = atomic_load_explicit(&theirs->patience.n_waits, memory_order_seq_cst);
    bool is_mutual =
        atomic_load_explicit(&theirs->activity.is_waiting, memory_order_relaxed) != 0 &&
        atomic_load_explicit(&theirs->activity.peer, memory_order_relaxed) == transport->rank;
    int64_t now_ns = fc_now_ns();

    if (!is_mutual || inquiry->mutual_ns == 0 || wait != inquiry->wait) {
        inquiry->mutual_ns = is_mutual ? now_ns : 0;
        inquiry->wait = wait;
        inquiry->looks = looks;
        return false;
    }
    /* The first look may have begun before this rank waited, the second has not. */
    return now_ns - inquiry->mutual_ns >= MUTUAL_NS && looks - inquiry->looks >= 2;
}

static const char *why_silent(const fc_transport *t, int peer, const fc_shm_inquiry *inquiry)
{
    const fc_shm_answer *theirs = &fc_shm_rank_of(t, peer)->answer;
    uint32_t heard = atomic_load_explicit(&theirs->heard, memory_order_acquire);
    uint32_t answered = atomic_load_explicit(&theirs->answered, memory_order_acquire);
    bool has_heard = (int32_t)(heard - inquiry->question) >= 0;

    if (fc_process_is_stopped(&t->shm->peers[peer])) {
        return "; its process is stopped (by SIGSTOP or a debugger)";
    }
    /* Or its watcher still asks Python for who asked before, and hears nobody meanwhile. */
    return has_heard || heard != answered
               ? "; its Python does not answer: it is in a C call that keeps the interpreter's lock"
               : "; its process does not answer";
}

void fc_shm_tell_place(const fc_transport *transport, int peer, const fc_shm_inquiry *inquiry,
                       char *out, size_t bytes)
{
    const fc_place *place = &inquiry->place;

    out[0] = '\0';
    if (inquiry->question == 0) {
        return;
    }
    if (!inquiry->is_answered && fc_now_ns() - inquiry->at_ns >= AGAIN_NS) {
        (void)snprintf(out, bytes, "%s", why_silent(transport, peer, inquiry));
    } else if (place->is_gather) {
        (void)snprintf(out, bytes,
                       "; it is in a gather of full parameters (%s): is it saving alone? All ranks "
                       "must call it",
                       place->text);
    } else if (place->text[0] != '\0') {
        (void)snprintf(out, bytes, "; it is at %s", place->text);
    }
}

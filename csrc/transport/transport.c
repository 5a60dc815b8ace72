/* What both kinds of transport share: identity, the broken state, words. */
#include "transport/transport.h"

#include "base/alloc.h"
#include "base/clock.h"
#include "transport/process.h"
#include "transport/transport_impl.h"

#include <math.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

#define FOREVER_S 1e9

static const char shm_kind[] = "shm", message_kind[] = "callback";

fc_status fc_transport_alloc(const fc_transport_config *config, fc_transport **out)
{
    size_t name_bytes;
    fc_transport *t;

    if (config->n_ranks < 1 || config->rank < 0 || config->rank >= config->n_ranks ||
        config->name == NULL || config->global_ranks == NULL || config->timeout_ns <= 0) {
        return fc_fail(FC_ERR_INVALID, "transport: rank %d of %d, timeout %lld ns", config->rank,
                       config->n_ranks, (long long)config->timeout_ns);
    }
    name_bytes = strlen(config->name) + 1;
    t = fc_alloc(1, sizeof(*t));
    if (t == NULL) {
        return fc_fail(FC_ERR_NOMEM, "transport: %zu bytes", sizeof(*t));
    }
    t->name = fc_alloc(1, name_bytes);
    t->global_ranks = fc_alloc((size_t)config->n_ranks, sizeof(int));
    if (t->name == NULL || t->global_ranks == NULL) {
        fc_transport_free(t);
        return fc_fail(FC_ERR_NOMEM, "transport of %d ranks", config->n_ranks);
    }
    memcpy(t->name, config->name, name_bytes);
    memcpy(t->global_ranks, config->global_ranks, (size_t)config->n_ranks * sizeof(int));
    t->rank = config->rank;
    t->n_ranks = config->n_ranks;
    t->timeout_ns = config->timeout_ns;
    t->host = config->host;
    t->generation = fc_process_generation();
    *out = t;
    return FC_OK;
}

void fc_transport_free(fc_transport *transport)
{
    fc_free(transport->global_ranks);
    fc_free(transport->name);
    fc_free(transport);
}

void fc_transport_destroy(fc_transport *transport)
{
    if (transport == NULL) {
        return;
    }
    if (transport->shm != NULL) {
        fc_shm_destroy(transport);
    }
    if (transport->messages.release != NULL) {
        transport->messages.release(transport->messages.context);
    }
    fc_transport_free(transport);
}

static fc_status create(const char *kind, const fc_transport_config *config,
                        const fc_message_ops *messages, fc_transport **out)
{
    if (strcmp(kind, shm_kind) == 0) {
        return fc_shm_create(config, out);
    }
    if (strcmp(kind, message_kind) == 0) {
        return fc_callback_create(config, messages, out);
    }
    return fc_fail(FC_ERR_INVALID, "transport kind '%s': expected '%s', or '%s' with messages",
                   kind, shm_kind, message_kind);
}

fc_status fc_transport_create(const char *kind, const fc_transport_config *config,
                              const fc_message_ops *messages, fc_transport **out)
{
    fc_status st = create(kind, config, messages, out);

    if (messages->release != NULL && (st != FC_OK || fc_transport_is_mapped(*out))) {
        messages->release(messages->context);
    }
    return st;
}

const char *fc_transport_kind(const fc_transport *transport)
{
    if (fc_transport_is_mapped(transport)) {
        return shm_kind;
    }
    return transport->messages.kind != NULL ? transport->messages.kind : message_kind;
}

int64_t fc_transport_timeout_ns(double seconds)
{
    if (isnan(seconds) || seconds <= 0) {
        return 0;
    }
    return seconds >= FOREVER_S ? INT64_MAX : (int64_t)(seconds * (double)FC_NS_PER_S);
}

int fc_transport_rank(const fc_transport *transport)
{
    return transport->rank;
}

int fc_transport_n_ranks(const fc_transport *transport)
{
    return transport->n_ranks;
}

int fc_transport_global_rank(const fc_transport *transport, int rank)
{
    return rank >= 0 && rank < transport->n_ranks ? transport->global_ranks[rank] : -1;
}

const char *fc_transport_name(const fc_transport *transport)
{
    return transport->name;
}

bool fc_transport_is_mapped(const fc_transport *transport)
{
    return transport->shm != NULL;
}

const fc_message_ops *fc_transport_messages(const fc_transport *transport)
{
    return transport->shm == NULL ? &transport->messages : NULL;
}

int64_t fc_transport_notice_ns(int n_notices)
{
    static const int first_s[] = {5, 15, 45, 120};
    const int n = (int)(sizeof(first_s) / sizeof(first_s[0]));
    const int later_s = 300;

    return FC_NS_PER_S *
           (n_notices < n ? first_s[n_notices] : first_s[n - 1] + (n_notices - n + 1) * later_s);
}

bool fc_transport_is_forked(const fc_transport *transport)
{
    return transport->generation != fc_process_generation();
}

void fc_transport_mark_broken(fc_transport *transport, fc_status status, const char *text)
{
    if (transport->broken == FC_OK) {
        (void)snprintf(transport->broken_text, sizeof(transport->broken_text), "%s", text);
        transport->broken = status;
    }
}

fc_status fc_transport_check(fc_transport *transport)
{
    if (fc_transport_is_forked(transport)) {
        return fc_fail(
            FC_ERR_STATE,
            "process group %s: a forked child cannot use the transport of its parent process",
            transport->name);
    }
    if (transport->broken == FC_OK && transport->shm != NULL) {
        fc_shm_adopt_abort(transport);
    }
    if (transport->broken != FC_OK) {
        return fc_fail(FC_ERR_BROKEN, "process group %s cannot be used any more: %s",
                       transport->name, transport->broken_text);
    }
    return FC_OK;
}

fc_status fc_transport_abort(fc_transport *transport, fc_status status, const char *text)
{
    char copy[FC_MESSAGE_BYTES];

    /* `text` may be the last message itself, which fc_fail writes over. */
    (void)snprintf(copy, sizeof(copy), "%s", text);
    if (!fc_transport_is_forked(transport) && transport->broken == FC_OK) {
        fc_transport_mark_broken(transport, status, copy);
        if (transport->shm != NULL) {
            fc_shm_abort(transport, status, copy);
        }
    }
    return fc_fail(status, "%s", copy);
}

void fc_transport_wait_stats(const fc_transport *transport, uint64_t *waits_out,
                             uint64_t *wait_ns_out)
{
    *waits_out = transport->n_waits;
    *wait_ns_out = transport->wait_ns;
}

uint64_t fc_word_load(const fc_word *word)
{
    /* Pairs with the release in fc_transport_publish. */
    return atomic_load_explicit((const _Atomic uint64_t *)&word->value, memory_order_acquire);
}

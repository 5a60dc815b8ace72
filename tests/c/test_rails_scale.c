/* What rails cost a rank of many hosts: messages, bytes, memory. One host of eight ranks is real,
 * and shares memory; the others answer each message with what they were sent, as hosts do that have
 * the same data. `table` prints figures. */
#define _GNU_SOURCE
#define RANKS_MAX 8

#include "ranks.h"

#include "base/alloc.h"
#include "comm/rails_impl.h"
#include "kernels/kernels.h"

#define CHECK_OK(call)                                                                             \
    do {                                                                                           \
        const fc_status st_ = (call);                                                              \
        CHECK_MSG(st_ == FC_OK, "%s: %s", #call, fc_last_message());                               \
    } while (0)

#define N_LOCAL 8
#define TIMEOUT_NS (60 * FC_NS_PER_S)
#define SMALL_NUMEL ((size_t)64)    /* of a rank: travels in the frame */
#define LARGE_NUMEL ((size_t)16384) /* of a rank: 64 KiB */
#define PERIOD 4                    /* of values: parts of ranks in one place are alike */

/* ---- hosts that answer with what they were sent ---- */

typedef struct message {
    struct message *next;
    size_t bytes;
    char data[];
} message;

typedef struct line {
    message *first, **end;
    struct {
        void *data;
        size_t bytes;
    } asked[4];
    size_t n_asked, n_awaited;
    bool has_frame; /* has been answered without being asked; the rest follows */
} line;

typedef struct echo {
    line *lines; /* by rank */
    uint64_t n_messages;
    const fc_message_ops *ops;
} echo;

static fc_status echo_send(void *context, int rank, uint32_t key, const void *data, size_t bytes)
{
    echo *e = context;
    line *l = &e->lines[rank];
    message *m = malloc(sizeof(*m) + bytes);

    (void)key;
    CHECK_OR_EXIT(m != NULL);
    *m = (message){.bytes = bytes};
    memcpy(m->data, data, bytes);
    if (l->first == NULL) {
        l->end = &l->first;
    }
    *l->end = m;
    l->end = &m->next;
    e->n_messages++;
    return FC_OK;
}

static fc_status echo_receive(void *context, int rank, uint32_t key, void *data, size_t bytes)
{
    line *l = &((echo *)context)->lines[rank];

    (void)key;
    CHECK_OR_EXIT(l->n_asked - l->n_awaited < 4);
    l->asked[l->n_asked % 4].data = data;
    l->asked[l->n_asked++ % 4].bytes = bytes;
    return FC_OK;
}

static fc_status echo_await_sent(void *context, int rank)
{
    (void)context, (void)rank;
    return FC_OK;
}

/* Who listens to a host and does not speak to it is told what this host says. */
static void answer_alike(const echo *e, line *l, void *data)
{
    const rails *r = e->ops->context;
    const rails_call *call = &r->calls[RAILS_AT_ONCE];
    const size_t said = N_LOCAL * (size_t)call->header.bytes;
    const char *own = r->buffers[RAILS_TOGETHER].data + (size_t)r->host * said;
    rails_frame *frame = data;

    if (l->has_frame) {
        memcpy(data, own, said);
        l->has_frame = false;
        return;
    }
    frame->header = call->header;
    if (said <= sizeof(frame->data)) {
        memcpy(frame->data, own, said);
    } else {
        l->has_frame = true;
    }
}

static fc_status echo_await_received(void *context, int rank)
{
    line *l = &((echo *)context)->lines[rank];
    message *m = l->first;

    CHECK_OR_EXIT(l->n_awaited < l->n_asked);
    if (m == NULL) {
        answer_alike(context, l, l->asked[l->n_awaited++ % 4].data);
        return FC_OK;
    }
    CHECK_EQ(m->bytes, l->asked[l->n_awaited % 4].bytes);
    memcpy(l->asked[l->n_awaited++ % 4].data, m->data, m->bytes);
    l->first = m->next;
    free(m);
    return FC_OK;
}

/* To who speaks and does not listen. */
static void forget_answers(echo *e, int n_ranks)
{
    for (int r = 0; r < n_ranks; r++) {
        line *l = &e->lines[r];

        while (l->first != NULL) {
            message *m = l->first;

            l->first = m->next;
            free(m);
        }
    }
}

static void echo_nothing(void *context)
{
    (void)context;
}

/* ---- a rank ---- */

typedef struct cost {
    int64_t set_up_ns, bytes_set_up, bytes_after;
    uint64_t messages[3], bytes[3]; /* all_gather, reduce_scatter, all_reduce */
} cost;

typedef struct member {
    ranks_host host;
    fc_transport *local;
    fc_message_ops ops;
    echo echo;
    int rank, n_hosts;
} member;

static int64_t held(void)
{
    return fc_account_bytes(FC_FOR_OBJECTS) + fc_account_bytes(FC_FOR_MESSAGES);
}

static fc_status create(member *m, int rank, int n_hosts)
{
    const int n_ranks = n_hosts * N_LOCAL;
    int *hosts = malloc((size_t)n_ranks * sizeof(*hosts));
    const char **names = malloc((size_t)n_hosts * sizeof(*names));
    fc_transport_config local = ranks_config(&m->host, 0, rank, N_LOCAL, TIMEOUT_NS);
    fc_status st;

    for (int r = 0; r < n_ranks; r++) {
        hosts[r] = r / N_LOCAL;
        names[r / N_LOCAL] = "host";
    }
    m->rank = rank;
    m->n_hosts = n_hosts;
    m->echo.ops = &m->ops;
    m->echo.lines = calloc((size_t)n_ranks, sizeof(*m->echo.lines));
    CHECK_OK(fc_shm_create(&local, &m->local));
    const fc_rails_config config = {.rank = rank,
                                    .n_ranks = n_ranks,
                                    .global_ranks = hosts, /* for messages alone */
                                    .hosts = hosts,
                                    .names = names,
                                    .local = m->local,
                                    .rails = {.context = &m->echo,
                                              .send = echo_send,
                                              .receive = echo_receive,
                                              .await_sent = echo_await_sent,
                                              .await_received = echo_await_received,
                                              .interrupt = echo_nothing,
                                              .drop = echo_nothing,
                                              .release = echo_nothing},
                                    .group = {.release = echo_nothing}};
    st = fc_rails_create(&config, &m->ops);
    free(names);
    free(hosts);
    return st;
}

/* The same on all hosts. */
static float value_of(int rank, size_t i)
{
    return (float)(rank % N_LOCAL * 100 + (int)(i % PERIOD));
}

static void all_gather(member *m, size_t numel)
{
    const size_t n_ranks = (size_t)m->n_hosts * N_LOCAL;
    float *send = malloc(numel * sizeof(float)), *recv = malloc(n_ranks * numel * sizeof(float));
    size_t n_wrong = 0;

    for (size_t i = 0; i < numel; i++) {
        send[i] = value_of(m->rank, i);
    }
    CHECK_OK(m->ops.all_gather(m->ops.context, recv, send, numel * sizeof(float)));
    for (size_t i = 0; i < n_ranks * numel; i++) {
        n_wrong += recv[i] != value_of((int)(i / numel), i % numel);
    }
    CHECK_EQ(n_wrong, 0);
    free(recv);
    free(send);
}

/* Each rank gives the same to all: the sum of the host's ranks, as often as there are hosts. */
static float sum_of(const member *m, size_t i)
{
    return (float)m->n_hosts * (float)(2800 + (int)(i % PERIOD) * N_LOCAL);
}

static void reduce_scatter(member *m, size_t numel)
{
    const size_t n_ranks = (size_t)m->n_hosts * N_LOCAL;
    float *send = malloc(n_ranks * numel * sizeof(float)), *recv = malloc(numel * sizeof(float));
    size_t n_wrong = 0;

    for (size_t i = 0; i < n_ranks * numel; i++) {
        send[i] = value_of(m->rank, i % numel);
    }
    CHECK_OK(m->ops.reduce_scatter(m->ops.context, recv, send, numel, FC_F32));
    for (size_t i = 0; i < numel; i++) {
        n_wrong += recv[i] != sum_of(m, i);
    }
    CHECK_EQ(n_wrong, 0);
    free(recv);
    free(send);
}

static void all_reduce(member *m, size_t numel)
{
    float *data = malloc(numel * sizeof(float));
    size_t n_wrong = 0;

    for (size_t i = 0; i < numel; i++) {
        data[i] = value_of(m->rank, i);
    }
    CHECK_OK(m->ops.all_reduce(m->ops.context, data, numel, FC_F32));
    for (size_t i = 0; i < numel; i++) {
        n_wrong += data[i] != sum_of(m, i);
    }
    CHECK_EQ(n_wrong, 0);
    free(data);
}

typedef struct trial {
    int n_hosts;
    size_t numel;
    cost *cost; /* of rank 0; shared by the ranks */
} trial;

static fc_rails_sent sent_in_all(const fc_message_ops *ops)
{
    fc_rails_sent all = {0};

    for (int h = 0; h < fc_rails_n_hosts(ops); h++) {
        const fc_rails_sent sent = fc_rails_count(ops, h);

        all.bytes += sent.bytes;
        all.messages += sent.messages;
    }
    return all;
}

static void on_rank(int rank, int n_ranks, void *arg)
{
    static void (*const calls[])(member *, size_t) = {all_gather, reduce_scatter, all_reduce};
    const trial *t = arg;
    const int64_t before = held();
    member m = {0};
    cost found = {0};

    (void)n_ranks;
    found.set_up_ns = -fc_now_ns();
    CHECK_OK(create(&m, rank, t->n_hosts));
    found.set_up_ns += fc_now_ns();
    found.bytes_set_up = held() - before;
    for (size_t i = 0; i < 3; i++) {
        const uint64_t bytes = sent_in_all(&m.ops).bytes, messages = m.echo.n_messages;

        calls[i](&m, t->numel);
        forget_answers(&m.echo, t->n_hosts * N_LOCAL);
        found.bytes[i] = sent_in_all(&m.ops).bytes - bytes;
        found.messages[i] = m.echo.n_messages - messages;
        CHECK_EQ(m.echo.n_messages, sent_in_all(&m.ops).messages);
    }
    found.bytes_after = held() - before;
    if (rank == 0) {
        *t->cost = found;
    }
    m.ops.release(m.ops.context);
    fc_transport_destroy(m.local);
    free(m.echo.lines);
}

static cost cost_of(int n_hosts, size_t numel)
{
    cost *shared =
        mmap(NULL, sizeof(*shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    trial t = {n_hosts, numel, shared};
    cost found;

    CHECK_OR_EXIT(shared != MAP_FAILED);
    ranks_check(N_LOCAL, on_rank, &t);
    found = *shared;
    (void)munmap(shared, sizeof(*shared));
    return found;
}

/* ---- what grows, and how ---- */

/* One message to one rank of each other host, where a chunk is one piece; in a gather the first
 * rank speaks for its host, and frames go ahead of what it says. */
static void test_small_ones_are_a_message_to_each_host(void)
{
    const uint64_t others = 63;
    const cost found = cost_of(64, SMALL_NUMEL);

    CHECK_EQ(found.messages[0], 2 * others);
    CHECK_EQ(found.bytes[0], others * N_LOCAL * SMALL_NUMEL * sizeof(float));
    for (int i = 1; i < 3; i++) {
        CHECK_EQ(found.messages[i], others);
        CHECK_EQ(found.bytes[i], others * SMALL_NUMEL * sizeof(float));
    }
}

/* A frame goes ahead. The bytes are those of theory: F / (H L) to each of H - 1 ranks. */
static void test_large_ones_send_a_chunk_to_each_host(void)
{
    const uint64_t others = 15, chunk = LARGE_NUMEL * sizeof(float);
    const cost found = cost_of(16, LARGE_NUMEL);

    CHECK_EQ(found.bytes[0], others * chunk);
    CHECK_EQ(found.bytes[1], others * chunk);
    /* Of a part of it both; the gather is small, and rank 0 speaks for its host. */
    CHECK_EQ(found.bytes[2], (1 + N_LOCAL) * others * chunk / (16 * N_LOCAL));
    CHECK(found.messages[0] <= 2 * others);
}

static void test_nothing_grows_with_the_square_of_ranks(void)
{
    const cost few = cost_of(16, SMALL_NUMEL), many = cost_of(64, SMALL_NUMEL);

    CHECK_MSG(many.bytes_set_up <= 4 * few.bytes_set_up, "%lld after %lld bytes at set-up",
              (long long)many.bytes_set_up, (long long)few.bytes_set_up);
    CHECK_MSG(many.bytes_after <= 5 * few.bytes_after, "%lld after %lld bytes after a step",
              (long long)many.bytes_after, (long long)few.bytes_after);
}

static void print_table(void)
{
    static const int hosts[] = {4, 16, 64, 128, 512};

    (void)printf("hosts x 8  set-up us  KiB at set-up  KiB after  messages and KiB sent by a rank:"
                 " gather, reduce, all-reduce of 64 KiB a rank\n");
    for (size_t i = 0; i < sizeof(hosts) / sizeof(*hosts); i++) {
        const cost c = cost_of(hosts[i], LARGE_NUMEL);

        (void)printf("%9d  %9.0f  %13.1f  %9.1f", hosts[i], (double)c.set_up_ns / 1e3,
                     (double)c.bytes_set_up / 1024, (double)c.bytes_after / 1024);
        for (int k = 0; k < 3; k++) {
            (void)printf("  %llu, %.0f", (unsigned long long)c.messages[k],
                         (double)c.bytes[k] / 1024);
        }
        (void)printf("\n");
    }
}

int main(int argc, char **argv)
{
    if (argc > 1 && strcmp(argv[1], "table") == 0) {
        print_table();
        return check_result();
    }
    test_small_ones_are_a_message_to_each_host();
    test_large_ones_send_a_chunk_to_each_host();
    test_nothing_grows_with_the_square_of_ranks();
    return check_result();
}

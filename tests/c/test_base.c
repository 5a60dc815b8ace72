/* The base layer: status texts, messages per thread, allocations that are counted and fail on
 * demand. */
#include "check.h"

#include "base/alloc.h"
#include "base/clock.h"
#include "base/dtype.h"
#include "base/idle.h"
#include "base/status.h"
#include "base/threads.h"

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <sys/prctl.h>
#include <unistd.h>

/* Called by the sanitizers: a request that is too large is answered with NULL, as without them. */
const char *__asan_default_options(void);
const char *__tsan_default_options(void);

__attribute__((visibility("default"))) const char *__asan_default_options(void)
{
    return "allocator_may_return_null=1";
}

__attribute__((visibility("default"))) const char *__tsan_default_options(void)
{
    return "allocator_may_return_null=1";
}

static fc_status answer(fc_status status)
{
    return status;
}

static fc_status pass_on(fc_status status)
{
    FC_TRY(answer(status));
    return FC_ERR_STATE; /* only reached after success */
}

static void test_status(void)
{
    CHECK_EQ(FC_OK, 0);
    CHECK_STR(fc_status_text(FC_OK), "success");
    CHECK_STR(fc_status_text(FC_ERR_TIMEOUT), "peer did not arrive in time");
    CHECK_STR(fc_status_text((fc_status)77), "unknown status");
#define CHECK_STATUS(name, value, text)                                                            \
    CHECK_EQ(FC_##name, value);                                                                    \
    CHECK_STR(fc_status_text(FC_##name), text);
    FC_STATUS_MAP(CHECK_STATUS)
#undef CHECK_STATUS
    CHECK_EQ(pass_on(FC_OK), FC_ERR_STATE);
    CHECK_EQ(pass_on(FC_ERR_PEER), FC_ERR_PEER);
    CHECK_EQ(pass_on(FC_AGAIN), FC_AGAIN);
}

static void test_messages(void)
{
    char fill[2 * FC_MESSAGE_BYTES];

    CHECK_STR(fc_last_message(), "");
    CHECK_EQ(fc_fail(FC_ERR_INVALID, "rank %d of %d", 3, 2), FC_ERR_INVALID);
    CHECK_STR(fc_last_message(), "rank 3 of 2");
    CHECK_EQ(fc_fail_errno(FC_ERR_SYSTEM, ENOENT, "open %s", "it"), FC_ERR_SYSTEM);
    CHECK_STR(fc_last_message(), "open it: No such file or directory");
    (void)fc_fail_errno(FC_ERR_SYSTEM, 123456, "open");
    CHECK_HAS(fc_last_message(), "123456");

    memset(fill, 'x', sizeof(fill) - 1);
    fill[sizeof(fill) - 1] = '\0';
    (void)fc_fail(FC_ERR_INVALID, "%s", fill);
    CHECK_EQ(strlen(fc_last_message()), FC_MESSAGE_BYTES - 1);
    (void)fc_fail_errno(FC_ERR_INVALID, ENOENT, "%s", fill);
    CHECK_EQ(strlen(fc_last_message()), FC_MESSAGE_BYTES - 1);
}

static void *fail_elsewhere(void *unused)
{
    (void)unused;
    CHECK_STR(fc_last_message(), "");
    (void)fc_fail(FC_ERR_PEER, "there");
    CHECK_STR(fc_last_message(), "there");
    return NULL;
}

static void test_messages_of_threads(void)
{
    pthread_t thread;

    (void)fc_fail(FC_ERR_INVALID, "here");
    CHECK_OR_EXIT(pthread_create(&thread, NULL, fail_elsewhere, NULL) == 0);
    CHECK_OR_EXIT(pthread_join(thread, NULL) == 0);
    CHECK_STR(fc_last_message(), "here");
}

static bool is_zero(const void *memory, size_t bytes)
{
    const unsigned char *byte = memory;

    for (size_t i = 0; i < bytes; i++) {
        if (byte[i] != 0) {
            return false;
        }
    }
    return true;
}

static void test_alloc(void)
{
    int64_t live = fc_alloc_live();
    volatile size_t many =
        SIZE_MAX / 2; /* hidden from the compiler, which warns of such requests */
    size_t bytes = 5 << 20;
    void *small = fc_alloc(3, 100);
    void *empty = fc_alloc(0, 8);
    void *pages = fc_pages_alloc(FC_FOR_SLOTS, bytes);
    void *no_pages = fc_pages_alloc(FC_FOR_SLOTS, 0);

    CHECK_OR_EXIT(small != NULL && empty != NULL && pages != NULL && no_pages != NULL);
    CHECK(is_zero(small, 300) && is_zero(pages, bytes));
    CHECK_EQ((uintptr_t)pages % FC_PAGE, 0);
    CHECK_EQ(fc_alloc_live(), live + 4);
    CHECK(fc_alloc(many, 3) == NULL);
    CHECK_EQ(fc_alloc_live(), live + 4);
    fc_free(small);
    fc_free(empty);
    fc_free(NULL);
    fc_pages_free(FC_FOR_SLOTS, pages, bytes);
    fc_pages_free(FC_FOR_SLOTS, no_pages, 0);
    fc_pages_free(FC_FOR_SLOTS, NULL, 10);
    CHECK_EQ(fc_alloc_live(), live);
}

/* Exactly the n-th request fails, whichever kind it is. */
static void test_fail_after(void)
{
    int64_t live = fc_alloc_live();

    for (int64_t n = 0; n < 4; n++) {
        fc_alloc_fail_after(n);
        for (int64_t i = 0; i < 4; i++) {
            void *memory = i % 2 == 0 ? fc_alloc(1, 8) : fc_pages_alloc(FC_FOR_SLOTS, 8);

            CHECK_MSG((memory == NULL) == (i == n), "request %" PRId64 " with fail_after %" PRId64,
                      i, n);
            if (i % 2 == 0) {
                fc_free(memory);
            } else {
                fc_pages_free(FC_FOR_SLOTS, memory, 8);
            }
        }
    }
    fc_alloc_fail_after(0);
    fc_alloc_fail_after(-1);
    fc_free(fc_alloc(1, 1));
    CHECK_EQ(fc_alloc_live(), live);
}

static void test_round_up(void)
{
    CHECK_EQ(fc_round_up(0, 64), 0);
    CHECK_EQ(fc_round_up(1, 64), 64);
    CHECK_EQ(fc_round_up(64, 64), 64);
    CHECK_EQ(fc_round_up(7, 3), 9);
}

static void test_dtype(void)
{
#define CHECK_DTYPE(name, bytes, is_float)                                                         \
    CHECK_EQ(fc_dtype_bytes(FC_##name), bytes);                                                    \
    CHECK_STR(fc_dtype_name(FC_##name), #name);                                                    \
    CHECK_EQ(fc_dtype_is_float(FC_##name), is_float);
    FC_DTYPE_MAP(CHECK_DTYPE)
#undef CHECK_DTYPE
    CHECK_EQ(fc_dtype_bytes(FC_F64), sizeof(double));
    CHECK_EQ(fc_dtype_bytes(FC_BF16), 2);
    CHECK(fc_dtype_is_float(FC_F16) && !fc_dtype_is_float(FC_RAW2));
    for (int i = 0; i < FC_DTYPE_COUNT; i++) {
        CHECK_EQ(fc_dtype_is_float((fc_dtype)i), i < FC_FLOAT_COUNT);
    }
}

static void test_clock(void)
{
    int64_t first = fc_now_ns();
    int64_t deadline = fc_deadline_ns(FC_NS_PER_S);

    CHECK(first > 0 && fc_now_ns() >= first);
    CHECK(deadline >= first + FC_NS_PER_S && deadline <= fc_now_ns() + FC_NS_PER_S);
    CHECK_EQ(fc_deadline_ns(INT64_MAX), INT64_MAX);
    CHECK_EQ(fc_deadline_ns(INT64_MAX - first + 1), INT64_MAX);
    CHECK(fc_deadline_ns(-FC_NS_PER_S) < fc_now_ns());
}

enum {
    RUN,
    SLEEP,
    END
};

static _Atomic int wish; /* of the test to its thread */

static void *obey(void *name)
{
    (void)prctl(PR_SET_NAME, name);
    while (atomic_load(&wish) != END) {
        if (atomic_load(&wish) == SLEEP) {
            (void)usleep(1000000);
        }
    }
    return NULL;
}

/* Waits until the kernel says so. */
static bool comes_to_run(const char *name, bool runs)
{
    for (int i = 0; i < 10000 && fc_threads_any_runs(name) != runs; i++) {
        (void)usleep(1000);
    }
    return fc_threads_any_runs(name) == runs;
}

static void test_threads(void)
{
    static char name[] = "fc_busy (R) one";
    pthread_t thread;

    CHECK(!fc_threads_any_runs(name));
    atomic_store(&wish, RUN);
    CHECK_EQ(pthread_create(&thread, NULL, obey, name), 0);
    CHECK(comes_to_run(name, true));
    CHECK(!fc_threads_any_runs("fc_busy"));
    atomic_store(&wish, SLEEP);
    CHECK(comes_to_run(name, false));
    atomic_store(&wish, END);
    CHECK_EQ(pthread_join(thread, NULL), 0);
    CHECK(!fc_threads_any_runs(name));
}

/* ---- work for waits ---- */

static bool count_down(void *context)
{
    int *const left = context;

    CHECK(!fc_idle_step());                     /* one thread is at it, */
    CHECK(!fc_idle_begin(count_down, context)); /* which nobody waits for */
    return (*left)-- > 0;
}

static void test_idle(void)
{
    int left = 2, other = 1;

    CHECK(!fc_idle_step());
    CHECK(fc_idle_begin(count_down, &left));
    CHECK(!fc_idle_begin(count_down, &other));
    CHECK(fc_idle_step());
    fc_idle_end(&other); /* is not that work */
    CHECK(fc_idle_step());
    CHECK(!fc_idle_step()); /* it says that nothing is left */
    CHECK_EQ(left, -1);
    CHECK(!fc_idle_step()); /* and is not asked again */
    CHECK_EQ(left, -1);
    CHECK(fc_idle_begin(count_down, &other));
    fc_idle_end(&other);
    CHECK(!fc_idle_step());
    CHECK_EQ(other, 1);
}

static bool linger(void *context)
{
    atomic_int *const at = context;

    atomic_store(at, 1);
    (void)usleep(50000);
    atomic_store(at, 2);
    return true;
}

static void *step_once(void *unused)
{
    (void)unused;
    CHECK(fc_idle_step());
    return NULL;
}

/* What the work uses may be freed then. */
static void test_the_end_waits_for_who_is_at_it(void)
{
    atomic_int at = 0;
    pthread_t thread;

    CHECK(fc_idle_begin(linger, &at));
    CHECK_EQ(pthread_create(&thread, NULL, step_once, NULL), 0);
    while (atomic_load(&at) == 0) {
        (void)usleep(100);
    }
    fc_idle_end(&at);
    CHECK_EQ(atomic_load(&at), 2);
    CHECK(!fc_idle_step());
    CHECK_EQ(pthread_join(thread, NULL), 0);
}

int main(void)
{
    test_status();
    test_messages();
    test_messages_of_threads();
    test_alloc();
    test_fail_after();
    test_round_up();
    test_dtype();
    test_clock();
    test_threads();
    test_idle();
    test_the_end_waits_for_who_is_at_it();
    return check_result();
}

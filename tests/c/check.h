/* Assertions of the C test programs: a failure prints file, line and values, and the program goes
 * on.
 *
 * A program is one `int main(void)` that ends with `return check_result();`. Exit codes: 0 passed,
 * 1 failed, 77 skipped. Threading: CHECK from any thread; values are evaluated once. A forked child
 * ends with `_exit(check_result())`, and its parent checks that status with CHECK.
 */
#ifndef FC_TESTS_CHECK_H
#define FC_TESTS_CHECK_H

#include <inttypes.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CHECK_EXIT_PASS 0
#define CHECK_EXIT_FAIL 1
#define CHECK_EXIT_SKIP 77

/* After this many failures the program stops: the first ones tell what is wrong. */
#define CHECK_MAX_FAILURES 20

static _Atomic int check_failures;

static inline void check_count_failure(void)
{
    (void)fflush(stderr);
    if (atomic_fetch_add(&check_failures, 1) + 1 >= CHECK_MAX_FAILURES) {
        (void)fprintf(stderr, "stopped after %d failures\n", CHECK_MAX_FAILURES);
        exit(CHECK_EXIT_FAIL);
    }
}

/* The exit code so far. */
static inline int check_result(void)
{
    return atomic_load(&check_failures) == 0 ? CHECK_EXIT_PASS : CHECK_EXIT_FAIL;
}

#define CHECK(condition)                                                                           \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            (void)fprintf(stderr, "%s:%d: %s: not true: %s\n", __FILE__, __LINE__, __func__,       \
                          #condition);                                                             \
            check_count_failure();                                                                 \
        }                                                                                          \
    } while (0)

/* CHECK_MSG(a == b, "rank %d", rank): the message follows the condition. */
#define CHECK_MSG(condition, ...)                                                                  \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            (void)fprintf(stderr, "%s:%d: %s: not true: %s: ", __FILE__, __LINE__, __func__,       \
                          #condition);                                                             \
            (void)fprintf(stderr, __VA_ARGS__);                                                    \
            (void)fputc('\n', stderr);                                                             \
            check_count_failure();                                                                 \
        }                                                                                          \
    } while (0)

/* Equal integers (anything that converts to int64_t, fc_status included), both printed. */
#define CHECK_EQ(actual, expected)                                                                 \
    do {                                                                                           \
        int64_t check_actual_ = (int64_t)(actual);                                                 \
        int64_t check_expected_ = (int64_t)(expected);                                             \
        CHECK_MSG(check_actual_ == check_expected_, "%s is %" PRId64 ", expected %" PRId64,        \
                  #actual, check_actual_, check_expected_);                                        \
    } while (0)

/* Equal texts, both printed. */
#define CHECK_STR(actual, expected)                                                                \
    do {                                                                                           \
        const char *check_actual_ = (actual);                                                      \
        const char *check_expected_ = (expected);                                                  \
        CHECK_MSG(strcmp(check_actual_, check_expected_) == 0, "%s is \"%s\", expected \"%s\"",    \
                  #actual, check_actual_, check_expected_);                                        \
    } while (0)

/* `text` holds `part`. */
#define CHECK_HAS(text, part)                                                                      \
    do {                                                                                           \
        const char *check_text_ = (text);                                                          \
        const char *check_part_ = (part);                                                          \
        CHECK_MSG(strstr(check_text_, check_part_) != NULL, "no \"%s\" in \"%s\"", check_part_,    \
                  check_text_);                                                                    \
    } while (0)

/* Ends the program when going on makes no sense (a set-up that failed). */
#define CHECK_OR_EXIT(condition)                                                                   \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            (void)fprintf(stderr, "%s:%d: %s: cannot go on without: %s\n", __FILE__, __LINE__,     \
                          __func__, #condition);                                                   \
            exit(CHECK_EXIT_FAIL);                                                                 \
        }                                                                                          \
    } while (0)

#define CHECK_SKIP(reason)                                                                         \
    do {                                                                                           \
        (void)fprintf(stderr, "%s:%d: skipped: %s\n", __FILE__, __LINE__, (reason));               \
        exit(CHECK_EXIT_SKIP);                                                                     \
    } while (0)

#endif

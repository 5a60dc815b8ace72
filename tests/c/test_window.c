/* The page that a process shows: found by its name, with what was written; names, waits within
 * waits, texts that are cut, events that come round, and children that have none of it. */
#define _GNU_SOURCE
#include "check.h"

#include "base/clock.h"
#include "window/window.h"

#include <dirent.h>
#include <fcntl.h>
#include <stdbool.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#define RUN "a run"
#define RANK 3

/* The file as others find it; -1: there is none. Those that are open for reading are this test's.
 */
static int find_file(void)
{
    DIR *folder = opendir("/proc/self/fd");
    const struct dirent *entry;
    int found = -1;

    CHECK_OR_EXIT(folder != NULL);
    while ((entry = readdir(folder)) != NULL) {
        char path[300], target[300] = "";

        (void)snprintf(path, sizeof(path), "/proc/self/fd/%s", entry->d_name);
        if (readlink(path, target, sizeof(target) - 1) > 0 &&
            strcmp(target, "/memfd:" FC_WINDOW_NAME " (deleted)") == 0 &&
            (fcntl(atoi(entry->d_name), F_GETFL) & O_ACCMODE) == O_RDWR) {
            CHECK_EQ(found, -1);
            found = open(path, O_RDONLY | O_CLOEXEC);
        }
    }
    (void)closedir(folder);
    return found;
}

static bool is_mapped(void)
{
    FILE *maps = fopen("/proc/self/maps", "r");
    char line[512];
    bool found = false;

    CHECK_OR_EXIT(maps != NULL);
    while (fgets(line, sizeof(line), maps) != NULL) {
        found = found || strstr(line, FC_WINDOW_NAME) != NULL;
    }
    (void)fclose(maps);
    return found;
}

/* As another process sees it. */
static fc_window_page read_page(int fd)
{
    fc_window_page page;

    CHECK_EQ(pread(fd, &page, sizeof(page), 0), (ssize_t)sizeof(page));
    CHECK_EQ(page.now.n_writes % 2, 0);
    CHECK_EQ(page.wait.n_writes % 2, 0);
    CHECK_EQ(page.error.n_writes % 2, 0);
    return page;
}

static const char *read_name(int fd, uint64_t name)
{
    static char text[256];

    CHECK(pread(fd, text, sizeof(text) - 1, (off_t)(FC_WINDOW_NAMES_AT + name)) > 0);
    return text;
}

static fc_window_event read_event(int fd, uint64_t n)
{
    const size_t at = FC_WINDOW_EVENTS_AT + n % FC_WINDOW_EVENTS * sizeof(fc_window_event);
    fc_window_event event;

    CHECK_EQ(pread(fd, &event, sizeof(event), (off_t)at), (ssize_t)sizeof(event));
    return event;
}

/* ---- before the page is open, and after fork ---- */

static void test_nobody_sees_what_is_not_open(void)
{
    const uint32_t before = fc_window_name("told before");

    CHECK(before != 0);
    CHECK_EQ(find_file(), -1);
    fc_window_enter(FC_WINDOW_FORWARD, 1);
    fc_window_use_unit(before);
    CHECK_EQ(fc_window()->use.unit, before);
    CHECK(!fc_window_traces());
    fc_window_mark(FC_WINDOW_EVENT_LEFT, before);
    fc_window_failed(FC_ERR_PEER, "an early error");
}

static void test_child_has_none(int fd)
{
    const uint64_t step = read_page(fd).now.step;
    pid_t child;
    int status;

    CHECK(is_mapped());
    child = fork();
    if (child == 0) {
        const fc_window_config config = {.run = "the child's", .rank = 1, .world = 2};

        CHECK_EQ(find_file(), -1);
        CHECK(!is_mapped());
        CHECK(!fc_window_traces());
        fc_window_enter(FC_WINDOW_BACKWARD, step + 100);
        CHECK_EQ(read_page(fd).now.step, step);
        CHECK_STR(read_name(fd, fc_window_name("told before")), "told before");
        CHECK_EQ(fc_window_open(&config), FC_OK);
        fd = find_file();
        CHECK_STR(read_page(fd).head.run, "the child's");
        CHECK_EQ(read_page(fd).head.pid, getpid());
        CHECK_STR(read_name(fd, fc_window_name("told before")), "told before");
        _exit(check_result());
    }
    CHECK_EQ(waitpid(child, &status, 0), child);
    CHECK_EQ(status, 0);
    CHECK_EQ(read_page(fd).now.step, step);
    CHECK_STR(read_page(fd).head.run, RUN);
}

/* Files that a program has closed, and opened others in their place, are not closed in a child. */
static void test_child_closes_nothing_else(int own)
{
    int status;
    pid_t child;

    CHECK_OR_EXIT(dup2(open("/dev/null", O_RDONLY | O_CLOEXEC), own) == own);
    child = fork();
    if (child == 0) {
        CHECK(fcntl(own, F_GETFD) >= 0);
        _exit(check_result());
    }
    CHECK_EQ(waitpid(child, &status, 0), child);
    CHECK_EQ(status, 0);
}

/* ---- what is written ---- */

static void test_head(int fd)
{
    const fc_window_page page = read_page(fd);
    struct stat file;

    CHECK_EQ(fstat(fd, &file), 0);
    CHECK_EQ(file.st_mode & 07777, S_IRUSR | S_IWUSR);
    CHECK_EQ(file.st_size, page.head.bytes);
    CHECK_EQ(page.head.magic, FC_WINDOW_MAGIC);
    CHECK_EQ(page.head.version, FC_WINDOW_VERSION);
    CHECK_EQ(page.head.pid, getpid());
    CHECK_EQ(page.head.start_ticks, 77);
    CHECK_EQ(page.head.rank, RANK);
    CHECK_EQ(page.head.world, 8);
    CHECK_EQ(page.head.n_events, FC_WINDOW_EVENTS);
    CHECK_STR(page.head.run, RUN);
    /* From before it was open. */
    CHECK_EQ(page.now.phase, FC_WINDOW_FORWARD);
    CHECK_STR(read_name(fd, page.use.unit), "told before");
    CHECK_STR(page.error.text, "an early error");
}

static void test_names(int fd)
{
    const uint32_t first = fc_window_name("layers.0");
    char text[64];
    uint32_t last = 1;
    int n = 0;

    CHECK_EQ(fc_window_name("layers.0"), first);
    CHECK_STR(read_name(fd, first), "layers.0");
    CHECK_EQ(fc_window_name(NULL), 0);
    CHECK_EQ(fc_window_name(""), 0);
    for (; last != 0 && n < 100000; n++) {
        (void)snprintf(text, sizeof(text), "a unit of a model with many of them, number %d", n);
        last = fc_window_name(text);
        CHECK(last == 0 || strcmp(read_name(fd, last), text) == 0);
    }
    CHECK(n > 2000 && n < 100000); /* then there is no more room */
    CHECK_EQ(fc_window_name("layers.0"), first);
}

static void test_phases(int fd)
{
    fc_window_page page;
    uint64_t n_began = fc_window()->now.n_began;

    for (uint64_t step = 10; step < 10 + FC_WINDOW_BEGAN + 5; step++) {
        fc_window_enter(FC_WINDOW_FORWARD, step);
        fc_window_enter(FC_WINDOW_BACKWARD, step);
        n_began++;
    }
    page = read_page(fd);
    CHECK_EQ(page.now.phase, FC_WINDOW_BACKWARD);
    CHECK_EQ(page.now.step, 10 + FC_WINDOW_BEGAN + 4);
    CHECK_EQ(page.now.n_began, n_began);
    CHECK(page.now.since_ns >= page.now.began_ns[(n_began - 1) % FC_WINDOW_BEGAN]);
    CHECK(page.now.began_ns[(n_began - 1) % FC_WINDOW_BEGAN] >=
          page.now.began_ns[n_began % FC_WINDOW_BEGAN]); /* the oldest that is kept */
    fc_account_add(FC_FOR_SLOTS, 12345);
    fc_window_enter(FC_WINDOW_BETWEEN, 1);
    CHECK_EQ(read_page(fd).now.memory[FC_FOR_SLOTS], 12345);
    fc_account_add(FC_FOR_SLOTS, -12345);
}

static void test_wait_within_a_wait(int fd)
{
    const fc_window_waiting outer = {
        .since_ns = 5, .rank = FC_WINDOW_ALL, .op = 1, .unit = 2, .step = 9};
    const fc_window_waiting inner = {.since_ns = 6, .rank = 4, .op = 3, .unit = 0, .step = 10};
    fc_window_waiting before = fc_window_wait_for(outer);
    fc_window_page page;

    CHECK_EQ(before.since_ns, 0);
    before = fc_window_wait_for(inner);
    CHECK_EQ(before.since_ns, 5);
    fc_window_tell_place("it is at train.py:41 in main");
    page = read_page(fd);
    CHECK_EQ(page.wait.is_waiting, 1);
    CHECK_EQ(page.wait.rank, 4);
    CHECK_EQ(page.wait.op, 3);
    CHECK_STR(page.wait.place, "it is at train.py:41 in main");
    (void)fc_window_wait_for(before);
    page = read_page(fd);
    CHECK_EQ(page.wait.is_waiting, 1);
    CHECK_EQ(page.wait.since_ns, 5);
    CHECK_EQ(page.wait.rank, FC_WINDOW_ALL);
    CHECK_EQ(page.wait.unit, 2);
    CHECK_EQ(page.wait.step, 9);
    CHECK_STR(page.wait.place, "");
    (void)fc_window_wait_for((fc_window_waiting){.since_ns = 0});
    CHECK_EQ(read_page(fd).wait.is_waiting, 0);
}

static void test_what_another_thread_tells(int fd)
{
    const fc_window_waiting what = {
        .since_ns = 70, .rank = 4, .op = 3, .host = fc_window_name("host1"), .step = 10};
    const fc_window_waiting before = fc_window_wait_for(what);
    fc_window_page page;

    CHECK_EQ(fc_window_waits().since_ns, 70);
    CHECK_EQ(fc_window_waits().host, what.host);
    fc_window_tell_of(70, "host host1 answers");
    page = read_page(fd);
    CHECK_STR(read_name(fd, page.wait.host), "host1");
    CHECK_STR(page.wait.place, "");
    CHECK_EQ(page.told.n_writes % 2, 0);
    CHECK_EQ(page.told.since_ns, page.wait.since_ns);
    CHECK_STR(page.told.text, "host host1 answers");
    (void)fc_window_wait_for(before);
    CHECK_EQ(read_page(fd).wait.host, 0);
    CHECK_EQ(fc_window_waits().since_ns, 0);
}

static void test_errors(int fd)
{
    char text[2 * FC_WINDOW_ERROR_BYTES];
    const uint64_t n = fc_window()->error.n_errors;
    fc_window_page page;

    fc_window_failed(FC_ERR_UNSUPPORTED, "cannot be had here");
    fc_window_failed(FC_ERR_INTERRUPTED, "a signal");
    CHECK_EQ(read_page(fd).error.n_errors, n);
    for (size_t i = 0; i + 2 < sizeof(text); i += 2) {
        memcpy(text + i, "\xc3\xa9", 2); /* a letter of two bytes */
    }
    text[sizeof(text) - 2] = '\0';
    fc_window_failed(FC_ERR_PEER, text);
    page = read_page(fd);
    CHECK_EQ(page.error.n_errors, n + 1);
    CHECK_EQ(strlen(page.error.text), FC_WINDOW_ERROR_BYTES - 2); /* no half of a letter */
    fc_window_failed(FC_ERR_PEER, "short");
    CHECK_STR(read_page(fd).error.text, "short");
}

static void test_events_come_round(int fd)
{
    const uint32_t unit = fc_window_name("layers.0");
    const uint64_t n = fc_window()->use.n_events;
    fc_window_event event;

    fc_window_use_unit(unit);
    fc_window_mark(FC_WINDOW_EVENT_PASSED, unit);
    fc_window_waited((fc_window_waiting){.since_ns = 50, .rank = 2, .op = 8, .unit = unit}, 90);
    CHECK_EQ(read_page(fd).use.n_events, n + 3);
    event = read_event(fd, n);
    CHECK_EQ(event.kind, FC_WINDOW_EVENT_UNIT);
    CHECK_EQ(event.unit, unit);
    CHECK(event.from_ns > 0 && event.from_ns <= (uint64_t)fc_now_ns());
    CHECK_EQ(read_event(fd, n + 1).kind, FC_WINDOW_EVENT_PASSED);
    event = read_event(fd, n + 2);
    CHECK_EQ(event.kind, FC_WINDOW_EVENT_WAIT);
    CHECK_EQ(event.from_ns, 50);
    CHECK_EQ(event.value, 90);
    CHECK_EQ(event.what, 8);
    CHECK_EQ(event.rank, 2);
    for (uint64_t i = 0; i < FC_WINDOW_EVENTS; i++) {
        fc_window_mark(FC_WINDOW_EVENT_LEFT, unit);
    }
    CHECK_EQ(read_page(fd).use.n_events, n + 3 + FC_WINDOW_EVENTS);
    CHECK_EQ(read_event(fd, n + 2).kind, FC_WINDOW_EVENT_LEFT);
}

static int file_of(int fd)
{
    struct stat wanted, found;

    CHECK_EQ(fstat(fd, &wanted), 0);
    for (int i = 0; i < 64; i++) {
        if (i != fd && fstat(i, &found) == 0 && found.st_ino == wanted.st_ino &&
            found.st_dev == wanted.st_dev) {
            return i;
        }
    }
    return -1;
}

int main(void)
{
    const fc_window_config config = {
        .run = RUN, .rank = RANK, .world = 8, .start_ticks = 77, .traces = true};
    int fd;

    test_nobody_sees_what_is_not_open();
    CHECK_EQ(fc_window_open(&config), FC_OK);
    CHECK_EQ(fc_window_open(&config), FC_OK); /* changes nothing */
    fd = find_file();
    CHECK_OR_EXIT(fd >= 0);
    test_head(fd);
    test_phases(fd);
    test_wait_within_a_wait(fd);
    test_what_another_thread_tells(fd);
    test_errors(fd);
    test_events_come_round(fd);
    test_child_has_none(fd);
    test_names(fd);
    test_child_closes_nothing_else(file_of(fd));
    return check_result();
}

/* Process identity from /proc, liveness from a pidfd where the kernel has them. */
#include "transport/process.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434 /* one number on every architecture; older headers lack the name */
#endif

#define STAT_BYTES 1024
#define FIELD_STATE 3
#define FIELD_START_TICKS 22

static _Atomic unsigned generation;
static pthread_once_t generation_once = PTHREAD_ONCE_INIT;

static void count_fork(void)
{
    atomic_fetch_add_explicit(&generation, 1, memory_order_relaxed);
}

static void watch_forks(void)
{
    (void)pthread_atfork(NULL, NULL, count_fork);
}

unsigned fc_process_generation(void)
{
    return atomic_load_explicit(&generation, memory_order_relaxed);
}

static int open_retry(const char *path, int flags)
{
    int fd;

    do {
        fd = open(path, flags);
    } while (fd < 0 && errno == EINTR);
    return fd;
}

/* State letter and start time of a process; false when it does not exist. */
static bool read_stat(int32_t pid, char *state_out, uint64_t *start_ticks_out)
{
    char path[64];
    char text[STAT_BYTES];
    char *at;
    ssize_t n;
    int fd;

    (void)snprintf(path, sizeof(path), "/proc/%d/stat", (int)pid);
    fd = open_retry(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) {
        return false;
    }
    n = read(fd, text, sizeof(text) - 1);
    (void)close(fd);
    if (n <= 0) {
        return false;
    }
    text[n] = '\0';
    /* The command may hold blanks and brackets: the fields begin after the last bracket. */
    at = strrchr(text, ')');
    if (at == NULL || at[1] != ' ') {
        return false;
    }
    at += 2;
    *state_out = *at;
    for (int field = FIELD_STATE; field < FIELD_START_TICKS; field++) {
        at = strchr(at, ' ');
        if (at == NULL) {
            return false;
        }
        at++;
    }
    *start_ticks_out = strtoull(at, NULL, 10);
    return true;
}

fc_status fc_open_status(int code)
{
    return code == EMFILE || code == ENFILE ? FC_ERR_SYSTEM : FC_ERR_UNSUPPORTED;
}

fc_status fc_process_self(fc_process_id *out)
{
    struct stat namespace_stat;
    fc_process_id id = {.pid = (int32_t)getpid()};
    char state;

    (void)pthread_once(&generation_once, watch_forks);
    errno = 0;
    if (!read_stat(id.pid, &state, &id.start_ticks)) {
        return fc_fail_errno(fc_open_status(errno), errno, "cannot read /proc/%d/stat",
                             (int)id.pid);
    }
    if (stat("/proc/self/ns/pid", &namespace_stat) == 0) {
        id.pid_namespace = (uint32_t)namespace_stat.st_ino;
    }
    *out = id;
    return FC_OK;
}

fc_status fc_process_open(const fc_process_id *id, fc_process *out)
{
    uint64_t start_ticks;
    char state;
    int pidfd = (int)syscall(SYS_pidfd_open, id->pid, 0);

    /* Read after the pidfd is held: a match proves that the pidfd means the process that told us
     * its id. */
    errno = 0;
    if (!read_stat(id->pid, &state, &start_ticks) || start_ticks != id->start_ticks) {
        fc_status st = fc_open_status(errno);

        if (pidfd >= 0) {
            (void)close(pidfd);
        }
        if (st == FC_ERR_SYSTEM) {
            return fc_fail_errno(st, EMFILE,
                                 "cannot look at process %d: raise the limit of open "
                                 "files (ulimit -n)",
                                 (int)id->pid);
        }
        return fc_fail(FC_ERR_UNSUPPORTED, "process %d cannot be seen from process %d",
                       (int)id->pid, (int)getpid());
    }
    out->id = *id;
    out->pidfd = pidfd;
    return FC_OK;
}

void fc_process_close(fc_process *process)
{
    if (process->pidfd >= 0) {
        (void)close(process->pidfd);
        process->pidfd = -1;
    }
}

bool fc_process_is_alive(const fc_process *process)
{
    uint64_t start_ticks;
    char state;

    if (process->pidfd >= 0) {
        struct pollfd entry = {.fd = process->pidfd, .events = POLLIN};

        return poll(&entry, 1, 0) <= 0;
    }
    if (!read_stat(process->id.pid, &state, &start_ticks)) {
        return false;
    }
    return start_ticks == process->id.start_ticks && state != 'Z' && state != 'X';
}

bool fc_process_is_stopped(const fc_process *process)
{
    uint64_t start_ticks;
    char state;

    return read_stat(process->id.pid, &state, &start_ticks) &&
           start_ticks == process->id.start_ticks && (state == 'T' || state == 't');
}

void fc_process_reset_in_children(void (*reset)(void))
{
    (void)pthread_atfork(NULL, NULL, reset);
}

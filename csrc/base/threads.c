/* Names and states of threads, from /proc; starting them. */
#define _GNU_SOURCE /* names of threads */

#include "base/threads.h"

#include "base/clock.h"

#include <dirent.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#define TASKS "/proc/self/task"
#define STAT_BYTES 128 /* the thread's number, its name and its state come first */
#define NAME_BYTES 16

/* Of one thread, by its number. False if it has ended. */
static bool runs(const char *task, const char *name)
{
    char path[sizeof(TASKS) + 64], text[STAT_BYTES] = "", begin[NAME_BYTES + 8];
    const char *found;
    FILE *file;

    (void)snprintf(path, sizeof(path), TASKS "/%.32s/stat", task);
    file = fopen(path, "r");
    if (file == NULL) {
        return false;
    }
    (void)!fgets(text, sizeof(text), file);
    (void)fclose(file);
    (void)snprintf(begin, sizeof(begin), "(%.15s) R", name);
    found = strchr(text, '(');
    return found != NULL && strncmp(found, begin, strlen(begin)) == 0;
}

bool fc_threads_any_runs(const char *name)
{
    DIR *tasks = opendir(TASKS);
    const struct dirent *task;
    bool found = false;

    if (tasks == NULL) {
        return false;
    }
    while (!found && (task = readdir(tasks)) != NULL) {
        found = task->d_name[0] != '.' && runs(task->d_name, name);
    }
    (void)closedir(tasks);
    return found;
}

int fc_thread_start(const char *name, void *(*body)(void *arg), void *arg, pthread_t *out)
{
    pthread_t thread;
    sigset_t all, before;
    int error;

    (void)sigfillset(&all);
    (void)pthread_sigmask(SIG_SETMASK, &all, &before);
    error = pthread_create(&thread, NULL, body, arg);
    (void)pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (error != 0) {
        return error;
    }
    if (name != NULL) {
        (void)pthread_setname_np(thread, name);
    }
    if (out != NULL) {
        *out = thread;
    } else {
        (void)pthread_detach(thread);
    }
    return 0;
}

void fc_condition_init(pthread_cond_t *out)
{
    pthread_condattr_t attributes;

    (void)pthread_condattr_init(&attributes);
    (void)pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    (void)pthread_cond_init(out, &attributes);
    (void)pthread_condattr_destroy(&attributes);
}

bool fc_condition_wait(pthread_cond_t *condition, pthread_mutex_t *lock, int64_t deadline_ns)
{
    const struct timespec until = {.tv_sec = deadline_ns / FC_NS_PER_S,
                                   .tv_nsec = deadline_ns % FC_NS_PER_S};

    return pthread_cond_timedwait(condition, lock, &until) == 0;
}

/* Mapped pages, and glibc's way to learn with which status a process exits. */

#include "snapshot/ranks.h"

#include "base/alloc.h"
#include "snapshot/snapshot.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define ENDED (FC_SNAPSHOT_WORDS - 1)

struct fc_snapshot_ranks {
    fc_snapshot_ranks *next; /* of all that are open */
    pid_t pid;
    size_t n_ranks, own, n_files;
    void **pages;
    char **files;
};

static struct {
    pthread_mutex_t lock;
    fc_snapshot_ranks *first;
    bool is_registered;
} open_ones = {.lock = PTHREAD_MUTEX_INITIALIZER};

static fc_status map_page(const char *path, void **out)
{
    struct stat file;
    void *page = MAP_FAILED;
    int code, fd;

    do {
        fd = open(path, O_RDWR | O_CLOEXEC | O_NOFOLLOW);
    } while (fd < 0 && errno == EINTR);
    if (fd >= 0 && fstat(fd, &file) == 0 && file.st_size >= (off_t)FC_SNAPSHOT_PAGE) {
        page = mmap(NULL, FC_SNAPSHOT_PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    }
    code = errno;
    if (fd >= 0) {
        (void)close(fd);
    }
    if (page == MAP_FAILED) {
        return fc_fail_errno(FC_ERR_SYSTEM, code, "snapshots: cannot map %s", path);
    }
    *out = page;
    return FC_OK;
}

static void at_exit(int status, void *unused)
{
    (void)unused;
    for (fc_snapshot_ranks *r = open_ones.first; status == 0 && r != NULL; r = r->next) {
        if (r->pid == getpid()) {
            (void)fc_snapshot_ranks_end(r);
        }
    }
}

static void add_open(fc_snapshot_ranks *r)
{
    (void)pthread_mutex_lock(&open_ones.lock);
    if (!open_ones.is_registered) {
        open_ones.is_registered = on_exit(at_exit, NULL) == 0;
    }
    r->next = open_ones.first;
    open_ones.first = r;
    (void)pthread_mutex_unlock(&open_ones.lock);
}

static void remove_open(const fc_snapshot_ranks *r)
{
    fc_snapshot_ranks **at = &open_ones.first;

    (void)pthread_mutex_lock(&open_ones.lock);
    while (*at != NULL && *at != r) {
        at = &(*at)->next;
    }
    if (*at != NULL) {
        *at = r->next;
    }
    (void)pthread_mutex_unlock(&open_ones.lock);
}

static fc_status fill(fc_snapshot_ranks *r, const char *const *pages, const char *const *files)
{
    r->pages = fc_alloc(r->n_ranks, sizeof(*r->pages));
    r->files = fc_alloc(r->n_files, sizeof(*r->files));
    if (r->pages == NULL || r->files == NULL) {
        return fc_fail(FC_ERR_NOMEM, "snapshots: out of memory");
    }
    for (size_t i = 0; i < r->n_files; i++) {
        const size_t bytes = strlen(files[i]) + 1;

        r->files[i] = fc_alloc(1, bytes);
        if (r->files[i] == NULL) {
            return fc_fail(FC_ERR_NOMEM, "snapshots: out of memory");
        }
        memcpy(r->files[i], files[i], bytes);
    }
    for (size_t i = 0; i < r->n_ranks; i++) {
        FC_TRY(map_page(pages[i], &r->pages[i]));
    }
    return FC_OK;
}

fc_status fc_snapshot_ranks_open(const char *const *pages, size_t n_ranks, size_t own,
                                 const char *const *files, size_t n_files, fc_snapshot_ranks **out)
{
    fc_snapshot_ranks *r = fc_alloc(1, sizeof(*r));
    fc_status st;

    if (r == NULL) {
        return fc_fail(FC_ERR_NOMEM, "snapshots: out of memory");
    }
    r->pid = getpid();
    r->n_ranks = n_ranks;
    r->own = own;
    r->n_files = n_files;
    st = fill(r, pages, files);
    if (st != FC_OK) {
        fc_snapshot_ranks_close(r);
        return st;
    }
    add_open(r);
    *out = r;
    return FC_OK;
}

void fc_snapshot_ranks_close(fc_snapshot_ranks *r)
{
    if (r == NULL) {
        return;
    }
    remove_open(r);
    for (size_t i = 0; r->pages != NULL && i < r->n_ranks; i++) {
        if (r->pages[i] != NULL) {
            (void)munmap(r->pages[i], FC_SNAPSHOT_PAGE);
        }
    }
    for (size_t i = 0; r->files != NULL && i < r->n_files; i++) {
        fc_free(r->files[i]);
    }
    fc_free(r->pages);
    fc_free(r->files);
    fc_free(r);
}

uint64_t fc_snapshot_ranks_word(const fc_snapshot_ranks *r, size_t rank, size_t i)
{
    return fc_snapshot_word(r->pages[rank], i);
}

void fc_snapshot_ranks_set_word(fc_snapshot_ranks *r, size_t i, uint64_t value)
{
    fc_snapshot_set_word(r->pages[r->own], i, value);
}

bool fc_snapshot_ranks_end(fc_snapshot_ranks *r)
{
    fc_snapshot_set_word(r->pages[r->own], ENDED, 1);
    /* Words are in one order for all: of two that end at once, at least one sees both. */
    for (size_t rank = 0; rank < r->n_ranks; rank++) {
        if (fc_snapshot_word(r->pages[rank], ENDED) == 0) {
            return false;
        }
    }
    for (size_t i = 0; i < r->n_files; i++) {
        (void)unlink(r->files[i]);
    }
    return true;
}

/* memfd segments: a header page for proof, then the bytes. */
#define _GNU_SOURCE /* memfd_create, fallocate */

#include "transport/shm_segment.h"

#include "base/alloc.h"
#include "transport/process.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#define MADV_POPULATE_WRITE 23
#endif

#define SEGMENT_MAGIC UINT64_C(0x66636d656d736567)
#define SEGMENT_VERSION 1U
#define FALLOCATE_TRIES 100

typedef struct segment_header {
    uint64_t magic;
    uint32_t version;
    uint32_t n_ranks;
    uint64_t bytes;
    uint64_t nonce;
} segment_header;

static_assert(sizeof(segment_header) == 32, "read by other processes");

static size_t mapped_bytes(size_t bytes)
{
    return fc_round_up(bytes ? bytes : 1, FC_PAGE);
}

/* Past RLIMIT_FSIZE the kernel also sends SIGXFSZ, which kills: look first. */
static fc_status check_file_limit(const char *what, size_t bytes)
{
    struct rlimit limit;

    if (getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY &&
        limit.rlim_cur < bytes) {
        return fc_fail(FC_ERR_NOMEM,
                       "%s: %zu bytes of shared memory exceed the file size limit (ulimit -f)",
                       what, bytes);
    }
    return FC_OK;
}

/* Reserves every page now, so that missing memory is an error here and not a SIGBUS in the middle
 * of a step. */
static fc_status reserve(int fd, const char *what, size_t bytes, size_t spare)
{
    int code = EINTR;

    FC_TRY(check_file_limit(what, bytes + spare));
    if (ftruncate(fd, (off_t)(bytes + spare)) != 0) {
        return fc_fail_errno(FC_ERR_NOMEM, errno, "%s: %zu bytes of shared memory", what, bytes);
    }
    for (int i = 0; i < FALLOCATE_TRIES && code == EINTR; i++) {
        code = fallocate(fd, 0, 0, (off_t)bytes) == 0 ? 0 : errno;
    }
    if (code != 0) {
        return fc_fail_errno(FC_ERR_NOMEM, code, "%s: %zu bytes of shared memory", what, bytes);
    }
    return FC_OK;
}

static fc_status write_header(int fd, const char *what, const segment_header *header)
{
    ssize_t n;

    do {
        n = pwrite(fd, header, sizeof(*header), 0);
    } while (n < 0 && errno == EINTR);
    if (n != (ssize_t)sizeof(*header)) {
        return fc_fail_errno(FC_ERR_SYSTEM, errno, "%s: cannot write to shared memory", what);
    }
    return FC_OK;
}

fc_status fc_segment_create(const char *what, size_t bytes, size_t spare, int n_ranks,
                            fc_segment_id *out)
{
    segment_header header = {.magic = SEGMENT_MAGIC,
                             .version = SEGMENT_VERSION,
                             .n_ranks = (uint32_t)n_ranks,
                             .bytes = bytes + spare};
    const size_t most = (size_t)INT64_MAX - (size_t)2 * FC_PAGE;
    fc_status st;
    int fd;

    if (bytes > most || spare > most - bytes) {
        return fc_fail(FC_ERR_INVALID, "%s: %zu bytes of shared memory", what, bytes);
    }
    if (getrandom(&header.nonce, sizeof(header.nonce), 0) != (ssize_t)sizeof(header.nonce)) {
        return fc_fail_errno(FC_ERR_SYSTEM, errno, "%s: no random number", what);
    }
    fd = memfd_create("fsdp_c", MFD_CLOEXEC);
    if (fd < 0) {
        return fc_fail_errno(errno == ENOSYS ? FC_ERR_UNSUPPORTED : FC_ERR_SYSTEM, errno,
                             "%s: cannot create shared memory", what);
    }
    (void)fchmod(fd, S_IRUSR | S_IWUSR);
    st = reserve(fd, what, FC_PAGE + mapped_bytes(bytes), spare);
    if (st == FC_OK) {
        st = write_header(fd, what, &header);
    }
    if (st != FC_OK) {
        (void)close(fd);
        return st;
    }
    *out = (fc_segment_id){.nonce = header.nonce,
                           .bytes = header.bytes,
                           .pid = (int32_t)getpid(),
                           .fd = fd,
                           .n_ranks = header.n_ranks};
    return FC_OK;
}

fc_status fc_segment_open(const fc_segment_id *id, int *fd_out)
{
    segment_header header;
    struct stat file;
    char path[64];
    ssize_t n;
    int fd;

    (void)snprintf(path, sizeof(path), "/proc/%d/fd/%d", (int)id->pid, (int)id->fd);
    do {
        fd = open(path, O_RDWR | O_CLOEXEC);
    } while (fd < 0 && errno == EINTR);
    if (fd < 0) {
        return fc_fail_errno(fc_open_status(errno), errno, "cannot open the memory of process %d",
                             (int)id->pid);
    }
    do {
        n = pread(fd, &header, sizeof(header), 0);
    } while (n < 0 && errno == EINTR);
    if (n != (ssize_t)sizeof(header) || header.magic != SEGMENT_MAGIC ||
        header.version != SEGMENT_VERSION || header.n_ranks != id->n_ranks ||
        header.bytes != id->bytes || header.nonce != id->nonce || fstat(fd, &file) != 0 ||
        (uint64_t)file.st_size != FC_PAGE + mapped_bytes(id->bytes)) {
        (void)close(fd);
        return fc_fail(FC_ERR_UNSUPPORTED, "the memory found at process %d is not that of the peer",
                       (int)id->pid);
    }
    *fd_out = fd;
    return FC_OK;
}

fc_status fc_segment_map(int fd, size_t bytes, size_t spare, bool is_private, char **out)
{
    int flags = is_private ? MAP_PRIVATE | MAP_NORESERVE : MAP_SHARED;
    void *memory =
        mmap(NULL, mapped_bytes(bytes + spare), PROT_READ | PROT_WRITE, flags, fd, FC_PAGE);

    if (memory == MAP_FAILED) {
        return fc_fail_errno(errno == ENOMEM ? FC_ERR_NOMEM : FC_ERR_SYSTEM, errno,
                             "cannot map %zu bytes of shared memory", bytes);
    }
    /* A hint against page faults in the first step. A private mapping must be filled for reading:
     * filling it for writing would copy every page and cut it off from the peers. */
    (void)madvise(memory, mapped_bytes(bytes),
                  is_private ? MADV_POPULATE_READ : MADV_POPULATE_WRITE);
    *out = memory;
    return FC_OK;
}

void fc_segment_unmap(char *memory, size_t bytes)
{
    if (memory != NULL) {
        (void)munmap(memory, mapped_bytes(bytes));
    }
}

void fc_segment_close(int fd)
{
    if (fd >= 0) {
        (void)close(fd);
    }
}

/* The page's life, and what is written to it. */
#define _GNU_SOURCE /* memfd_create, fallocate */

#include "window/window.h"

#include "base/clock.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stddef.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

static_assert(sizeof(fc_window_event) == 32, "read by other programs");
static_assert(sizeof(fc_window_page) <= FC_WINDOW_NAMES_AT, "names come behind it");
static_assert(offsetof(fc_window_page, now) == 512 && offsetof(fc_window_page, use) == 1024 &&
                  offsetof(fc_window_page, wait) == 1536 &&
                  offsetof(fc_window_page, told) == 2048 && offsetof(fc_window_page, error) == 2560,
              "read by other programs");

#define FALLOCATE_TRIES 100

static fc_window_page nowhere;
fc_window_page *fc_window_page_ = &nowhere;
fc_window_event *fc_window_events_;

static struct {
    pthread_mutex_t lock; /* of opening */
    bool is_fork_safe;
    int fd; /* by it others find the page; -1: not open */
    struct stat file;
} window = {.lock = PTHREAD_MUTEX_INITIALIZER, .fd = -1};

/* ---- words ---- */

static void put(uint64_t *word, uint64_t value)
{
    __atomic_store_n(word, value, __ATOMIC_RELEASE);
}

/* A block is written between two of these; its other words are released, so that who has read one
 * of them sees the odd number. */
static void turn(uint64_t *n_writes)
{
    put(n_writes, *n_writes + 1);
}

static void put_text(char *to, const char *text, size_t bytes)
{
    uint64_t words[(FC_WINDOW_ERROR_BYTES + 7) / 8] = {0};
    size_t n = text != NULL ? strnlen(text, bytes - 1) : 0;

    while (n > 0 && ((unsigned char)text[n] & 0xc0U) == 0x80U) { /* not within a character */
        n--;
    }
    memcpy(words, text != NULL ? text : "", n);
    for (size_t i = 0; i < bytes / sizeof(uint64_t); i++) {
        put((uint64_t *)(void *)to + i, words[i]);
    }
}

/* ---- names ---- */

#define NAME_SLOTS 8192 /* more than texts of 15 bytes that fit */
#define NAME_TRIES 64

static struct {
    uint32_t slots[NAME_SLOTS]; /* by hash */
    uint32_t used;              /* bytes of the block; the first is no name's */
    uint32_t is_busy;
} names = {.used = 1};

static char names_nowhere[FC_WINDOW_NAMES_BYTES];
static char *names_block = names_nowhere;

static uint32_t hash_of(const char *text)
{
    uint32_t hash = 2166136261U; /* FNV-1a */

    for (; *text != '\0'; text++) {
        hash = (hash ^ (unsigned char)*text) * 16777619U;
    }
    return hash;
}

/* Where the text is, or could be; NULL: neither. */
static uint32_t *find_slot(const char *text)
{
    const uint32_t hash = hash_of(text);

    for (uint32_t i = 0; i < NAME_TRIES; i++) {
        uint32_t *slot = &names.slots[(hash + i) % NAME_SLOTS];
        const uint32_t name = __atomic_load_n(slot, __ATOMIC_ACQUIRE);

        if (name == 0 || strcmp(names_block + name, text) == 0) {
            return slot;
        }
    }
    return NULL;
}

static uint32_t add_name(uint32_t *slot, const char *text)
{
    const uint32_t name = names.used;
    const size_t bytes = strlen(text) + 1;

    if (bytes > FC_WINDOW_NAMES_BYTES - name) {
        return 0;
    }
    memcpy(names_block + name, text, bytes);
    names.used += (uint32_t)bytes;
    __atomic_store_n(slot, name, __ATOMIC_RELEASE);
    return name;
}

uint32_t fc_window_name(const char *text)
{
    uint32_t *slot = text != NULL && text[0] != '\0' ? find_slot(text) : NULL;
    uint32_t name = 0;

    if (slot == NULL) {
        return 0;
    }
    name = __atomic_load_n(slot, __ATOMIC_ACQUIRE);
    if (name != 0 || __atomic_exchange_n(&names.is_busy, 1, __ATOMIC_ACQUIRE) != 0) {
        return name;
    }
    slot = find_slot(text);
    if (slot != NULL) {
        name = *slot != 0 ? *slot : add_name(slot, text);
    }
    __atomic_store_n(&names.is_busy, 0, __ATOMIC_RELEASE);
    return name;
}

/* ---- life ---- */

/* In a child, whose parent's page is none of its. The program may have closed all files, and opened
 * others. */
static void close_parents(void)
{
    struct stat file;

    if (window.fd >= 0 && fstat(window.fd, &file) == 0 && file.st_dev == window.file.st_dev &&
        file.st_ino == window.file.st_ino) {
        (void)close(window.fd);
    }
    window.fd = -1;
}

static void begin_anew(void)
{
    fc_window_page *parents = fc_window_page_;

    close_parents();
    nowhere = (fc_window_page){.use = {.unit = 0}};
    fc_window_page_ = &nowhere;
    fc_window_events_ = NULL;
    if (parents != &nowhere) {
        memcpy(names_nowhere, names_block, names.used);
        names_block = names_nowhere;
        (void)munmap(parents, parents->head.bytes);
    }
    names.is_busy = 0;
    window.lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
}

/* All of it, so that missing memory is an error here and not a signal in the middle of a step. */
static fc_status reserve(int fd, size_t bytes)
{
    int code = EINTR;

    for (int i = 0; i < FALLOCATE_TRIES && code == EINTR; i++) {
        code = fallocate(fd, 0, 0, (off_t)bytes) == 0 ? 0 : errno;
    }
    return code == 0
               ? FC_OK
               : fc_fail_errno(FC_ERR_NOMEM, code,
                               "%zu bytes of memory for what this process shows of itself", bytes);
}

static fc_status map(int fd, size_t bytes, char **out)
{
    void *memory;

    (void)fchmod(fd, S_IRUSR | S_IWUSR);
    FC_TRY(reserve(fd, bytes));
    memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (memory == MAP_FAILED) {
        return fc_fail_errno(FC_ERR_NOMEM, errno,
                             "%zu bytes of memory for what this process shows of itself", bytes);
    }
    *out = memory;
    return FC_OK;
}

static void fill(fc_window_page *page, const fc_window_config *config, size_t bytes)
{
    fc_window_head *head = &page->head;

    *page = *fc_window_page_;
    head->bytes = bytes;
    head->version = FC_WINDOW_VERSION;
    head->names_bytes = FC_WINDOW_NAMES_BYTES;
    head->n_events = config->traces ? FC_WINDOW_EVENTS : 0;
    head->pid = (uint64_t)getpid();
    head->start_ticks = config->start_ticks;
    head->rank = (uint64_t)config->rank;
    head->world = (uint64_t)config->world;
    head->opened_ns = page->now.since_ns = (uint64_t)fc_now_ns();
    put_text(head->run, config->run, sizeof(head->run));
}

static fc_status open_page(const fc_window_config *config)
{
    const size_t bytes =
        FC_WINDOW_EVENTS_AT + (config->traces ? FC_WINDOW_EVENTS * sizeof(fc_window_event) : 0);
    char *memory = NULL;
    fc_status st;
    int fd;

    fd = memfd_create(FC_WINDOW_NAME, MFD_CLOEXEC);
    if (fd < 0) {
        return fc_fail_errno(FC_ERR_SYSTEM, errno,
                             "no file in memory for what this process shows of itself");
    }
    st = map(fd, bytes, &memory);
    if (st != FC_OK) {
        (void)close(fd);
        return st;
    }
    memcpy(memory + FC_WINDOW_NAMES_AT, names_block, names.used);
    fill((fc_window_page *)(void *)memory, config, bytes);
    names_block = memory + FC_WINDOW_NAMES_AT;
    fc_window_page_ = (fc_window_page *)(void *)memory;
    fc_window_events_ =
        config->traces ? (fc_window_event *)(void *)(memory + FC_WINDOW_EVENTS_AT) : NULL;
    put(&fc_window_page_->head.magic, FC_WINDOW_MAGIC);
    (void)fstat(fd, &window.file);
    window.fd = fd;
    return FC_OK;
}

fc_status fc_window_open(const fc_window_config *config)
{
    fc_status st = FC_OK;

    (void)pthread_mutex_lock(&window.lock);
    if (!window.is_fork_safe) {
        window.is_fork_safe = pthread_atfork(NULL, NULL, begin_anew) == 0;
    }
    if (fc_window_page_ == &nowhere) {
        st = open_page(config);
    }
    (void)pthread_mutex_unlock(&window.lock);
    return st;
}

fc_window_page *fc_window(void)
{
    return fc_window_page_;
}

/* ---- events ---- */

static void record(fc_window_event event)
{
    fc_window_use *use = &fc_window_page_->use;
    const uint64_t n = use->n_events;

    fc_window_events_[n % FC_WINDOW_EVENTS] = event;
    put(&use->n_events, n + 1);
}

void fc_window_record(fc_window_event_kind kind, uint32_t unit)
{
    record((fc_window_event){
        .from_ns = (uint64_t)fc_now_ns(), .kind = (uint32_t)kind, .unit = unit, .rank = -1});
}

/* ---- what a process does ---- */

void fc_window_enter(fc_window_phase phase, uint64_t step)
{
    fc_window_now *now = &fc_window_page_->now;
    const uint64_t at_ns = (uint64_t)fc_now_ns();

    turn(&now->n_writes);
    put(&now->phase, (uint64_t)phase);
    put(&now->step, step);
    put(&now->since_ns, at_ns);
    if (phase == FC_WINDOW_FORWARD || phase == FC_WINDOW_FORWARD_NO_GRAD) {
        put(&now->began_ns[now->n_began % FC_WINDOW_BEGAN], at_ns);
        put(&now->n_began, now->n_began + 1);
    }
    for (int i = 0; i < FC_PURPOSE_COUNT; i++) {
        put(&now->memory[i], (uint64_t)fc_account_bytes((fc_purpose)i));
    }
    turn(&now->n_writes);
    if (fc_window_events_ != NULL) {
        record((fc_window_event){.from_ns = at_ns,
                                 .value = step,
                                 .kind = FC_WINDOW_EVENT_PHASE,
                                 .what = (uint32_t)phase,
                                 .rank = -1});
    }
}

fc_window_waiting fc_window_waits(void)
{
    const fc_window_wait *wait = &fc_window_page_->wait;

    return (fc_window_waiting){
        .since_ns = wait->is_waiting != 0 ? wait->since_ns : 0,
        .rank = wait->rank,
        .op = (uint32_t)wait->op,
        .unit = (uint32_t)wait->unit,
        .host = (uint32_t)wait->host,
        .step = wait->step,
    };
}

fc_window_waiting fc_window_wait_for(fc_window_waiting what)
{
    fc_window_wait *wait = &fc_window_page_->wait;
    const fc_window_waiting before = fc_window_waits();

    turn(&wait->n_writes);
    put(&wait->is_waiting, what.since_ns != 0);
    put(&wait->since_ns, what.since_ns);
    put(&wait->rank, what.rank);
    put(&wait->op, what.op);
    put(&wait->unit, what.unit);
    put(&wait->step, what.step);
    put(&wait->host, what.host);
    put((uint64_t *)(void *)wait->place, 0);
    turn(&wait->n_writes);
    return before;
}

void fc_window_tell_place(const char *text)
{
    fc_window_wait *wait = &fc_window_page_->wait;

    turn(&wait->n_writes);
    put_text(wait->place, text, sizeof(wait->place));
    turn(&wait->n_writes);
}

void fc_window_tell_of(uint64_t since_ns, const char *text)
{
    fc_window_told *told = &fc_window_page_->told;

    turn(&told->n_writes);
    put(&told->since_ns, since_ns);
    put_text(told->text, text, sizeof(told->text));
    turn(&told->n_writes);
}

void fc_window_waited(fc_window_waiting what, int64_t until_ns)
{
    if (fc_window_events_ != NULL) {
        record((fc_window_event){.from_ns = what.since_ns,
                                 .value = (uint64_t)until_ns,
                                 .kind = FC_WINDOW_EVENT_WAIT,
                                 .what = what.op,
                                 .unit = what.unit,
                                 .rank = what.rank == FC_WINDOW_ALL ? -1 : (int32_t)what.rank});
    }
}

void fc_window_failed(fc_status status, const char *text)
{
    fc_window_error *error = &fc_window_page_->error;

    if (status == FC_OK || status == FC_AGAIN || status == FC_ERR_UNSUPPORTED ||
        status == FC_ERR_INTERRUPTED) {
        return;
    }
    turn(&error->n_writes);
    put(&error->n_errors, error->n_errors + 1);
    put(&error->at_ns, (uint64_t)fc_now_ns());
    put_text(error->text, text, sizeof(error->text));
    turn(&error->n_writes);
}

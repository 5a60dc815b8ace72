// The types SnapshotCopier and SnapshotRanks, and what a snapshot's file says.
#include "snapshot/copier.h"

#include "bind/module.h"
#include "bind/python/objects.h"
#include "bind/tensor/tensors.h"
#include "snapshot/ranks.h"

#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <atomic>
#include <thread>

namespace fc {

namespace {

// Memory of a Python object, which cannot change its size meanwhile.
class Mapped : NoCopy {
public:
    Mapped(PyObject *object, bool is_written)
    {
        check(PyObject_GetBuffer(object, &view_, is_written ? PyBUF_WRITABLE : PyBUF_SIMPLE));
    }
    ~Mapped() { PyBuffer_Release(&view_); }
    void *memory() const { return view_.buf; }
    size_t bytes() const { return static_cast<size_t>(view_.len); }

private:
    Py_buffer view_;
};

// ---- SnapshotCopier ----

// A tensor whose memory a copy reads, kept until it is over. Its storage too, since others may give
// the tensor another one.
struct Read {
    at::Tensor local, shown; // the plain tensor, and the one that users see: writes count in either
    c10::Storage storage;
    uint32_t local_version, shown_version;
};

uint32_t version_of(const at::Tensor &tensor)
{
    const auto &counter = tensor.unsafeGetTensorImpl()->version_counter();
    return counter.enabled() ? counter.current_version() : 0;
}

bool is_unchanged(const Read &read)
{
    return version_of(read.local) == read.local_version &&
           version_of(read.shown) == read.shown_version;
}

// What a copy works on, until it is over.
struct Job : NoCopy {
    std::unique_ptr<Mapped> file;
    const std::thread::id owner = std::this_thread::get_id();
    std::vector<Read> read;
    std::vector<c10::Event> staged; // behind copies from devices
    std::string error;              // of these
};

// The stream of a device on which its tensors are copied to the host, while it computes on others.
class Staging {
public:
    explicit Staging(c10::Device device)
        : impl_(device.type()), stream_(impl_.getStreamFromGlobalPool(device, false))
    {
    }

    c10::Device device() const { return stream_.device(); }
    void begin() { mark(current()).block(stream_); }
    // A source that stays as it is is read when this stream gets to it, another one at once.
    void copy(const at::Tensor &to, const at::Tensor &source, bool stays) const
    {
        const at::NoGradGuard no_grad;
        const c10::StreamGuard guard(stays ? stream_ : current());
        to.copy_(source, /*non_blocking=*/true);
    }
    void end(std::vector<c10::Event> &events)
    {
        events.push_back(mark(stream_));
        events.push_back(mark(current()));
    }

private:
    c10::Stream current() const { return impl_.getStream(device()); }
    static c10::Event mark(const c10::Stream &stream)
    {
        c10::Event event(stream.device_type());
        event.record(stream);
        return event;
    }

    c10::impl::VirtualGuardImpl impl_;
    c10::Stream stream_;
};

// A tensor that is copied to the host first.
struct Staged {
    at::Tensor local, source;
    bool stays;
};

struct SnapshotCopier;
std::vector<SnapshotCopier *> copiers; // all of the process, under the interpreter's lock

struct SnapshotCopier : NoCopy {
    SnapshotCopier()
    {
        check(fc_copier_create(Out(core)));
        copiers.push_back(this);
    }
    ~SnapshotCopier()
    {
        copiers.erase(std::remove(copiers.begin(), copiers.end(), this), copiers.end());
        const NoGil no_gil;
        core.reset();
    }

    std::vector<Staging> stagings;            // one for each device that was met
    std::unique_ptr<Job> job;                 // null between copies
    Owned<fc_copier, fc_copier_destroy> core; // ends before what it reads
};

bool are_unchanged(void *job)
{
    const auto &read = static_cast<const Job *>(job)->read;
    return std::all_of(read.begin(), read.end(), is_unchanged);
}

// Commits what is copied, between two instructions of the main thread's Python code.
//
// A version counts a write when it is over. So it is asked for by the thread that writes, outside
// of operators: these may run Python code themselves, for modes and tensor subclasses.
std::atomic<bool> is_asked{false};

int commit_copies(void *)
{
    is_asked = false;
    if (c10::impl::tls_local_dispatch_key_set().excluded_.has(c10::DispatchKey::ADInplaceOrView)) {
        return 0;
    }
    for (SnapshotCopier *copier : copiers) {
        if (copier->job && copier->job->owner == std::this_thread::get_id()) {
            fc_copier_commit(copier->core.get());
        }
    }
    return 0;
}

void ask_for_commit(void *)
{
    if (!is_asked.exchange(true) && Py_AddPendingCall(commit_copies, nullptr) != 0) {
        is_asked = false; // too many are pending: the copier asks again
    }
}

bool await_staged(void *owner)
{
    Job &job = *static_cast<Job *>(owner);
    try {
        for (const c10::Event &event : job.staged) {
            event.synchronize();
        }
        return true;
    } catch (const std::exception &error) {
        job.error = error.what();
        return false;
    }
}

// Bytes of a dense tensor: from its first element on, in whichever order the others lie.
fc_snapshot_piece piece_of(const at::Tensor &tensor, bool is_now)
{
    if (!tensor.device().is_cpu() || !tensor.is_non_overlapping_and_dense()) {
        raise_error(PyExc_ValueError, "a snapshot takes dense CPU tensors");
    }
    return {tensor.const_data_ptr(), tensor.nbytes(), 0, is_now};
}

size_t room_for(PyObject *tensors)
{
    std::vector<fc_snapshot_piece> pieces;
    const Ref list = checked(PySequence_List(tensors));
    for (PyObject *tensor : items_of(list.get())) {
        pieces.push_back({nullptr, tensor_of(tensor).nbytes(), 0, true});
    }
    return fc_snapshot_place(pieces.data(), pieces.size());
}

Staging &staging_of(SnapshotCopier &self, c10::Device device)
{
    for (Staging &known : self.stagings) {
        if (known.device() == device) {
            return known;
        }
    }
    return self.stagings.emplace_back(device);
}

bool finish_core(SnapshotCopier &self)
{
    const NoGil no_gil;
    return fc_copier_finish(self.core.get());
}

// The host's memory is there when the events have come.
void stage(SnapshotCopier &self, const std::vector<Staged> &tensors,
           std::vector<c10::Event> &events)
{
    std::vector<c10::Device> devices;

    (void)finish_core(self); // may read the same memory still
    for (const Staged &one : tensors) {
        if (one.source.sizes() != one.local.sizes() || one.source.dtype() != one.local.dtype()) {
            raise_error(PyExc_ValueError, "a snapshot's tensor has another shape than before");
        }
        const c10::Device device = one.source.device();
        Staging &staging = staging_of(self, device);
        if (std::find(devices.begin(), devices.end(), device) == devices.end()) {
            devices.push_back(device);
            staging.begin();
        }
        staging.copy(one.local, one.source, one.stays);
    }
    for (const c10::Device device : devices) {
        staging_of(self, device).end(events);
    }
}

void start(SnapshotCopier &self, Fields &given)
{
    const Ref locals = given.list("locals"), sources = given.list("sources");
    const Ref shown = given.list("shown");
    const auto now = given.values<truth_of>("now"), watched = given.values<truth_of>("watched");
    const Ref index = given.object("index");
    std::vector<fc_snapshot_piece> pieces;
    std::vector<Staged> staged;
    auto made = std::make_unique<Job>();

    made->file = std::make_unique<Mapped>(given.object("file").get(), true);
    fc_snapshot_job job = {};
    job.sequence = given.size("sequence");
    job.step = given.size("step");
    given.end();
    for (size_t i = 0; i < now.size(); i++) {
        const at::Tensor &local = tensor_of(items_of(locals.get())[i]);
        const at::Tensor &source = tensor_of(items_of(sources.get())[i]);
        const at::Tensor &outer = tensor_of(items_of(shown.get())[i]);

        pieces.push_back(piece_of(local, now[i]));
        if (watched[i]) {
            made->read.push_back(
                {source, outer, source.storage(), version_of(source), version_of(outer)});
        }
        if (!source.is_same(local)) {
            staged.push_back({local, source, static_cast<bool>(watched[i])});
        }
    }
    const Mapped text(index.get(), false);
    const size_t bytes = fc_snapshot_place(pieces.data(), pieces.size());
    if (made->file->bytes() < FC_SNAPSHOT_PAGE + bytes + text.bytes()) {
        raise_error(PyExc_ValueError, "the file of the snapshot is too short");
    }
    job.file = made->file->memory();
    job.pieces = pieces.data();
    job.n_pieces = pieces.size();
    job.index = text.memory();
    job.index_bytes = text.bytes();
    job.ask_for_commit = ask_for_commit;
    job.is_unchanged = are_unchanged;
    if (!staged.empty()) {
        stage(self, staged, made->staged);
        job.await = await_staged;
    }
    job.owner = made.get();
    const fc_status st = [&] {
        const NoGil no_gil;
        return fc_copier_start(self.core.get(), &job);
    }();
    check(st); // an error of Python's needs the lock; a copy under way keeps its job
    self.job = std::move(made);
}

// Which of the tensors that were read have changed before the copy was over, by their places among
// those that were not copied at once; empty if the snapshot counts.
std::vector<size_t> finish(SnapshotCopier &self)
{
    std::vector<size_t> changed;

    (void)finish_core(self);
    const std::unique_ptr<Job> job = std::move(self.job);
    if (job && !job->error.empty()) {
        raise_error(
            PyExc_RuntimeError,
            ("Snapshots: a device has not copied what it was asked to: " + job->error).c_str());
    }
    for (size_t i = 0; job && i < job->read.size(); i++) {
        if (!is_unchanged(job->read[i])) {
            changed.push_back(i);
        }
    }
    if (!changed.empty()) {
        fc_snapshot_clear(job->file->memory());
    }
    return changed;
}

PyMethodDef copier_methods[] = {
    method<start>("start"),
    method<finish>("finish"),
    {},
};

// ---- SnapshotRanks ----

struct SnapshotRanks {
    explicit SnapshotRanks(Fields &given)
    {
        const Ref pages = given.list("pages"), files = given.list("files");
        const size_t own = given.size("own");
        std::vector<const char *> page_names, file_names;

        given.end();
        for (PyObject *page : items_of(pages.get())) {
            page_names.push_back(text_from(page));
        }
        for (PyObject *file : items_of(files.get())) {
            file_names.push_back(text_from(file));
        }
        n_ranks = page_names.size();
        if (own >= n_ranks) {
            raise_error(PyExc_ValueError, "there is no rank of that number");
        }
        check(fc_snapshot_ranks_open(page_names.data(), n_ranks, own, file_names.data(),
                                     file_names.size(), &core));
    }

    size_t n_ranks;
    fc_snapshot_ranks *core; // until close(): the process's exit needs it after the interpreter
};

fc_snapshot_ranks *open_ranks(SnapshotRanks &self)
{
    if (self.core == nullptr) {
        raise_error(PyExc_ValueError, "the pages are closed");
    }
    return self.core;
}

void close_ranks(SnapshotRanks &self)
{
    fc_snapshot_ranks_close(std::exchange(self.core, nullptr));
}

size_t word_number(size_t number)
{
    if (number >= FC_SNAPSHOT_WORDS) {
        raise_error(PyExc_IndexError, "a page has fewer words");
    }
    return number;
}

uint64_t get_word(SnapshotRanks &self, Fields &given)
{
    const size_t rank = given.size("rank"), word = word_number(given.size("word"));

    given.end();
    if (rank >= self.n_ranks) {
        raise_error(PyExc_IndexError, "there is no rank of that number");
    }
    return fc_snapshot_ranks_word(open_ranks(self), rank, word);
}

void set_word(SnapshotRanks &self, Fields &given)
{
    const size_t word = word_number(given.size("word"));
    const size_t value = given.size("value");

    given.end();
    fc_snapshot_ranks_set_word(open_ranks(self), word, value);
}

PyMethodDef ranks_methods[] = {
    method<get_word>("word"),
    method<set_word>("set_word"),
    method<[](SnapshotRanks &self) { return fc_snapshot_ranks_end(open_ranks(self)); }>("end"),
    method<close_ranks>("close"),
    {},
};

} // namespace

void finish_copies()
{
    for (SnapshotCopier *copier : copiers) {
        (void)finish_core(*copier);
    }
}

// ---- files ----

size_t snapshot_room(Fields &given)
{
    const Ref tensors = given.object("tensors");
    const size_t index_bytes = given.size("index_bytes");

    given.end();
    return FC_SNAPSHOT_PAGE + room_for(tensors.get()) + index_bytes;
}

Ref snapshot_layouts(PyObject *tensors)
{
    const Ref list = checked(PySequence_List(tensors));
    std::vector<int64_t> words;

    for (PyObject *object : items_of(list.get())) {
        const at::Tensor tensor = tensor_of(object);
        const auto sizes = tensor.sizes(), strides = tensor.strides();

        words.push_back(static_cast<int64_t>(tensor.scalar_type()));
        words.push_back(tensor.dim());
        words.insert(words.end(), sizes.begin(), sizes.end());
        words.insert(words.end(), strides.begin(), strides.end());
    }
    return checked(PyBytes_FromStringAndSize(reinterpret_cast<const char *>(words.data()),
                                             static_cast<Py_ssize_t>(words.size() * 8)));
}

Ref snapshot_facts(PyObject *file)
{
    const Mapped mapped(file, false);
    fc_snapshot_facts facts;

    if (!fc_snapshot_read(mapped.memory(), mapped.bytes(), &facts)) {
        return Ref::borrow(Py_None);
    }
    return dict_of({FC_ENTRY(facts, sequence), FC_ENTRY(facts, step), FC_ENTRY(facts, data_bytes),
                    FC_ENTRY(facts, index_bytes)});
}

bool snapshot_is_intact(PyObject *file)
{
    const Mapped mapped(file, false);
    const NoGil no_gil;

    return fc_snapshot_is_intact(mapped.memory(), mapped.bytes());
}

void snapshot_clear(PyObject *file)
{
    fc_snapshot_clear(Mapped(file, true).memory());
}

Ref snapshot_header(PyObject *file)
{
    const Mapped mapped(file, false);
    char header[FC_SNAPSHOT_HEADER];

    fc_snapshot_header(mapped.memory(), header);
    return checked(PyBytes_FromStringAndSize(header, sizeof(header)));
}

bool snapshot_adopt(Fields &given)
{
    const Mapped file(given.object("file").get(), true);
    const Mapped header(given.object("header").get(), false);

    given.end();
    if (header.bytes() != FC_SNAPSHOT_HEADER) {
        raise_error(PyExc_ValueError, "this is no header of a snapshot");
    }
    return fc_snapshot_adopt(file.memory(), file.bytes(), header.memory());
}

int register_snapshots(PyObject *module)
{
    if (PyModule_AddIntConstant(module, "SNAPSHOT_PAGE", FC_SNAPSHOT_PAGE) < 0 ||
        PyModule_AddIntConstant(module, "SNAPSHOT_TEXT_AT", FC_SNAPSHOT_TEXT_AT) < 0) {
        return -1;
    }
    if (add_type<SnapshotCopier>(
            module, {.name = "fsdp_c._C.SnapshotCopier", .methods = copier_methods}) < 0) {
        return -1;
    }
    return add_type<SnapshotRanks>(module,
                                   {.name = "fsdp_c._C.SnapshotRanks", .methods = ranks_methods});
}

} // namespace fc

// The types SnapshotCopier and SnapshotRanks, and what a snapshot's file says.
#include "snapshot/copier.h"

#include "bind/module.h"
#include "bind/python/objects.h"
#include "bind/tensor/tensors.h"
#include "snapshot/ranks.h"

#include <algorithm>

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
    std::vector<Read> read;
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

    std::unique_ptr<Job> job;                 // null between copies
    Owned<fc_copier, fc_copier_destroy> core; // ends before what it reads
};

bool are_unchanged(void *job)
{
    const auto &read = static_cast<const Job *>(job)->read;
    return std::all_of(read.begin(), read.end(), is_unchanged);
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
        pieces.push_back(piece_of(tensor_of(tensor), true));
    }
    return fc_snapshot_place(pieces.data(), pieces.size());
}

void start(SnapshotCopier &self, Fields &given)
{
    const Ref locals = given.list("locals"), shown = given.list("shown");
    const auto now = given.values<truth_of>("now");
    const Ref index = given.object("index");
    std::vector<fc_snapshot_piece> pieces;
    auto made = std::make_unique<Job>();

    made->file = std::make_unique<Mapped>(given.object("file").get(), true);
    fc_snapshot_job job = {};
    job.sequence = given.size("sequence");
    job.step = given.size("step");
    given.end();
    for (size_t i = 0; i < now.size(); i++) {
        const at::Tensor &local = tensor_of(items_of(locals.get())[i]);
        const at::Tensor &outer = tensor_of(items_of(shown.get())[i]);

        pieces.push_back(piece_of(local, now[i]));
        if (!now[i]) {
            made->read.push_back(
                {local, outer, local.storage(), version_of(local), version_of(outer)});
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
    job.is_unchanged = are_unchanged;
    job.owner = made.get();
    const fc_status st = [&] {
        const NoGil no_gil;
        return fc_copier_start(self.core.get(), &job);
    }();
    check(st); // an error of Python's needs the lock; a copy under way keeps its job
    self.job = std::move(made);
}

bool finish_core(SnapshotCopier &self)
{
    const NoGil no_gil;
    return fc_copier_finish(self.core.get());
}

// Which of the tensors that were read have changed before the copy was over, by their places among
// those that were not copied at once; empty if the snapshot counts.
std::vector<size_t> finish(SnapshotCopier &self)
{
    std::vector<size_t> changed;

    (void)finish_core(self);
    const std::unique_ptr<Job> job = std::move(self.job);
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

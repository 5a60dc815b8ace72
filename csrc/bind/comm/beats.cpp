/* `_C.Beats`: signs of life that ranks leave in their group's store, and find there. */
#include "bind/module.h"
#include "bind/python/objects.h"

#include "base/clock.h"

#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <condition_variable>
#include <csignal>
#include <map>
#include <mutex>
#include <thread>

namespace fc {

namespace {

constexpr auto PERIOD = std::chrono::seconds(1);
constexpr auto END_MAX = std::chrono::seconds(2); // a store that does not answer is left alone

struct Heard {
    std::string words;
    int64_t at_ns;
};

// Shared by its thread and the object: the thread outlives it in a store that does not answer.
struct Board {
    c10::intrusive_ptr<c10d::Store> store;
    std::string own;

    std::mutex mutex;
    std::condition_variable changed;
    bool ends = false, has_ended = false;
    std::string said;
    std::vector<std::string> wanted;
    std::map<std::string, Heard> heard;
    int64_t answered_ns = fc_now_ns();
};

void look(Board &board, const std::string &key)
{
    if (!board.store->check({key})) {
        return;
    }
    const std::vector<uint8_t> bytes = board.store->get(key);
    std::string words(bytes.begin(), bytes.end());
    const std::lock_guard<std::mutex> guard(board.mutex);
    Heard &heard = board.heard[key];
    if (heard.words != words) {
        heard = {std::move(words), fc_now_ns()};
    }
}

// Asks nothing of the store while this rank waits for nobody.
void beat(Board &board, uint64_t number)
{
    std::string words = std::to_string(number) + " ";
    std::vector<std::string> wanted;
    {
        const std::lock_guard<std::mutex> guard(board.mutex);
        words += board.said;
        wanted = board.wanted;
    }
    board.store->set(board.own, std::vector<uint8_t>(words.begin(), words.end()));
    for (const std::string &key : wanted) {
        look(board, key);
    }
    const std::lock_guard<std::mutex> guard(board.mutex);
    board.answered_ns = fc_now_ns();
}

// It needs no lock of the interpreter: a rank that holds it for a minute is alive.
void run(const std::shared_ptr<Board> &board)
{
    uint64_t number = 0;
    std::unique_lock<std::mutex> lock(board->mutex);
    while (!board->ends) {
        lock.unlock();
        try {
            beat(*board, ++number);
        } catch (const std::exception &) { // as one that does not answer
        }
        lock.lock();
        board->changed.wait_for(lock, PERIOD, [&] { return board->ends; });
    }
    board->has_ended = true;
    board->changed.notify_all();
}

struct Beats {
    explicit Beats(Fields &given)
    {
        const auto group = c10d::resolve_process_group(given.text("group"));
        board->own = given.text("rank");
        given.end();
        board->store =
            c10::make_intrusive<c10d::PrefixStore>("fsdp_c/beats", group->getStore()->clone());
        sigset_t all, before;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before); // signals are the main thread's
        std::thread(run, board).detach();
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
    }

    std::shared_ptr<Board> board = std::make_shared<Board>();
};

double seconds_since(int64_t ns)
{
    return (double)(fc_now_ns() - ns) / (double)FC_NS_PER_S;
}

void beats_say(Beats &self, PyObject *words)
{
    const std::lock_guard<std::mutex> guard(self.board->mutex);
    self.board->said = text_from(words);
}

void beats_want(Beats &self, PyObject *ranks)
{
    const Ref all = checked(PySequence_Tuple(ranks));
    std::vector<std::string> wanted;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(all.get()); i++) {
        wanted.emplace_back(text_from(PyTuple_GET_ITEM(all.get(), i)));
    }
    const std::lock_guard<std::mutex> guard(self.board->mutex);
    self.board->wanted = std::move(wanted);
}

Ref beats_heard(Beats &self)
{
    Ref dict = checked(PyDict_New());
    const std::lock_guard<std::mutex> guard(self.board->mutex);
    for (const auto &[key, heard] : self.board->heard) {
        const size_t space = heard.words.find(' ');
        const Ref row = checked(
            Py_BuildValue("(sd)", heard.words.c_str() + space + 1, seconds_since(heard.at_ns)));
        check(PyDict_SetItemString(dict.get(), key.c_str(), row.get()));
    }
    return dict;
}

double beats_answered(Beats &self)
{
    const std::lock_guard<std::mutex> guard(self.board->mutex);
    return seconds_since(self.board->answered_ns);
}

void beats_stop(Beats &self)
{
    const NoGil no_gil;
    std::unique_lock<std::mutex> lock(self.board->mutex);
    self.board->ends = true;
    self.board->changed.notify_all();
    self.board->changed.wait_for(lock, END_MAX, [&] { return self.board->has_ended; });
}

PyMethodDef beats_methods[] = {
    method<beats_say>("say", "say(words): what this rank leaves beside its next signs of life."),
    method<beats_want>("want", "want(ranks): whose signs are looked for from now on."),
    method<beats_heard>("heard", "heard() -> {rank: (words, seconds since its last new sign)}"),
    method<beats_answered>("answered", "answered() -> seconds since the store last answered."),
    method<beats_stop>("stop", "stop(): no signs any more."),
    {},
};

} // namespace

int register_beats(PyObject *module)
{
    return add_type<Beats>(
        module, {.name = "fsdp_c._C.Beats",
                 .doc = "Beats(*, group, rank)\n--\n\nLeaves a sign of life in the group's store "
                        "each second, whatever the interpreter does. Ranks are texts.",
                 .methods = beats_methods});
}

} // namespace fc

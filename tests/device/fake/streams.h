// Streams whose work is done as late, or as early, as their events allow. No torch.
#ifndef FAKE_STREAMS_H
#define FAKE_STREAMS_H

#include <Python.h>

#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <random>
#include <set>
#include <thread>
#include <utility>
#include <vector>

namespace fake {

// A place in a stream: so many pieces of its work are done.
struct Mark {
    int stream = -1; // none: reached from the beginning
    uint64_t place = 0;
};

// What was begun and goes on by itself, as a collective does: whether it is over.
using IsOver = std::function<bool()>;
using Begin = std::function<IsOver()>; // empty: it is over

// What the device is told about order, and a test may take away.
enum Kind {
    WAIT,          // of a stream, for an event
    RECORD,        // of an event
    RECORD_STREAM, // of memory that a stream other than its own uses
    HOST_WAIT      // of the calling thread, for an event
};

struct Said {
    Kind kind;
    int stream, of; // who waits, for whom
};

enum Order {
    LAZY,  // nothing is done before somebody waits for it
    AHEAD, // the same, but some streams have always done all that they have
    RANDOM // any stream goes on at any time
};

// All that is shared. Who holds it may run what streams have, which takes it again, or Python's
// lock, as the end of a process group's work does: nobody waits here with that one.
inline std::recursive_mutex lock;

class Locked {
public:
    explicit Locked(std::recursive_mutex &mutex) : mutex_(mutex)
    {
        if (!mutex_.try_lock()) {
            PyThreadState *state = PyGILState_Check() ? PyEval_SaveThread() : nullptr;
            mutex_.lock();
            if (state != nullptr) {
                PyEval_RestoreThread(state);
            }
        }
    }
    ~Locked() { mutex_.unlock(); }
    Locked(const Locked &) = delete;
    Locked &operator=(const Locked &) = delete;

private:
    std::recursive_mutex &mutex_;
};

class Streams {
public:
    void set_order(Order order, std::set<int> ahead, uint32_t seed)
    {
        const Locked locked(lock);
        order_ = order;
        ahead_ = std::move(ahead);
        random_.seed(seed);
    }

    // The k-th of a kind is ignored from here on; -1: none.
    void watch(Kind kind, int dropped)
    {
        const Locked locked(lock);
        said_.clear();
        dropped_kind_ = kind;
        dropped_ = dropped;
    }

    std::vector<Said> said()
    {
        const Locked locked(lock);
        return said_;
    }

    // Whether the device is to heed it.
    bool heeds(Kind kind, int stream, int of)
    {
        const Locked locked(lock);
        int n = 0;
        for (const Said &said : said_) {
            n += said.kind == kind;
        }
        said_.push_back({kind, stream, of});
        return kind != dropped_kind_ || n != dropped_;
    }

    void enqueue(int stream, Begin begin)
    {
        const Locked locked(lock);
        push(stream, {{}, std::move(begin), {}});
    }

    void run(int stream, std::function<void()> body)
    {
        enqueue(stream, [body = std::move(body)] {
            body();
            return IsOver();
        });
    }

    void wait(int stream, Mark mark)
    {
        const Locked locked(lock);
        if (mark.stream >= 0 && mark.stream != stream) {
            push(stream, {mark, {}, {}});
        }
    }

    Mark mark(int stream)
    {
        const Locked locked(lock);
        const Queue &queue = queues_[stream];
        return {stream, queue.n_done + queue.items.size()};
    }

    bool is_reached(Mark mark)
    {
        const Locked locked(lock);
        return mark.stream < 0 || queues_[mark.stream].n_done >= mark.place;
    }

    // Holds up the caller. What this takes of other streams is done, and no more.
    void reach(Mark mark)
    {
        const Locked locked(lock);
        while (!is_reached(mark) && step(queues_[mark.stream], true)) {
        }
    }

    void synchronize()
    {
        const Locked locked(lock);
        for (auto &[stream, queue] : queues_) {
            reach(mark(stream));
        }
    }

private:
    struct Item {
        Mark behind; // of a wait
        Begin begin; // of work
        IsOver is_over;
        bool is_begun = false;
    };

    struct Queue {
        std::deque<Item> items;
        uint64_t n_done = 0;
        bool is_running = false;
    };

    void push(int stream, Item item)
    {
        queues_[stream].items.push_back(std::move(item));
        if (order_ == AHEAD) {
            for (int each : ahead_) {
                reach(mark(each));
            }
        }
        if (order_ == RANDOM) {
            go_on_somewhere();
        }
    }

    void go_on_somewhere()
    {
        auto queue = queues_.begin();
        std::advance(queue, random_() % queues_.size());
        for (auto n = random_() % 8; n > 0 && step(queue->second, false); n--) {
        }
    }

    // Does the first thing in a queue; false: it cannot be done now. `must`: what it waits for is
    // done first.
    bool step(Queue &queue, bool must)
    {
        if (queue.items.empty() || queue.is_running) {
            return false;
        }
        Item &item = queue.items.front(); // stays where it is while others are appended
        if (!item.begin) {
            if (!is_reached(item.behind) && !must) {
                return false;
            }
            reach(item.behind);
        } else if (!is_done(queue, item, must)) {
            return false;
        }
        queue.items.pop_front();
        queue.n_done++;
        return true;
    }

    bool is_done(Queue &queue, Item &item, bool must)
    {
        if (!item.is_begun) {
            item.is_begun = true;
            const Running running(queue);
            item.is_over = item.begin();
        }
        for (int n = 0; item.is_over && !item.is_over(); n++) {
            if (!must) {
                return false;
            }
            let_others_go_on();
            if (n % 1000 == 999) { // perhaps another rank waits for another stream of this one
                const Running running(queue);
                for (auto &[_, other] : queues_) {
                    step(other, false);
                }
            }
        }
        return true;
    }

    // A collective's end may need Python's lock in another thread.
    static void let_others_go_on()
    {
        PyThreadState *state = PyGILState_Check() ? PyEval_SaveThread() : nullptr;
        std::this_thread::sleep_for(std::chrono::microseconds(50));
        if (state != nullptr) {
            PyEval_RestoreThread(state);
        }
    }

    struct Running {
        explicit Running(Queue &queue) : queue_(queue) { queue.is_running = true; }
        ~Running() { queue_.is_running = false; }
        Queue &queue_;
    };

    std::map<int, Queue> queues_; // references to its values stay
    Order order_ = LAZY;
    std::set<int> ahead_;
    std::mt19937 random_;
    std::vector<Said> said_;
    Kind dropped_kind_ = WAIT;
    int dropped_ = -1;
};

inline Streams streams;

} // namespace fake

#endif

// Memory that belongs to the stream it was allocated in, as that of CUDA's caching allocator does.
#ifndef FAKE_MEMORY_H
#define FAKE_MEMORY_H

#include "streams.h"

#include <c10/core/Allocator.h>
#include <c10/core/Stream.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

namespace fake {

inline const c10::Device the_device(c10::DeviceType::PrivateUse1, 0);

inline thread_local int current_stream = 0;

// Freed memory goes to the next who asks in its stream, the newest first. In that stream's order it
// gets bytes then that are NaN in all floating types. Memory is never given back to the system.
class Memory final : public c10::Allocator {
public:
    c10::DataPtr allocate(size_t bytes) override
    {
        if (bytes == 0) {
            return {nullptr, the_device};
        }
        void *memory = take(bytes);
        return {memory, memory, &give_back, the_device};
    }

    c10::DeleterFnPtr raw_deleter() const override { return &give_back; }

    void copy_data(void *to, const void *from, size_t bytes) const override
    {
        default_copy_data(to, from, bytes);
    }

    // Memory that is no block of ours, as a part of one, belongs to somebody who records it.
    void record(const void *memory, int stream)
    {
        const Locked locked(lock);
        const auto block = blocks_.find(const_cast<void *>(memory));
        if (block != blocks_.end() && block->second.home != stream) {
            block->second.users.insert(stream);
        }
    }

    int home_of(const void *memory)
    {
        const Locked locked(lock);
        const auto block = blocks_.find(const_cast<void *>(memory));
        return block == blocks_.end() ? -1 : block->second.home;
    }

    // While no stream has anything to do: nobody finds what a program before this one has left.
    void wipe()
    {
        const Locked locked(lock);
        settle();
        for (const auto &[home, free] : free_) {
            for (const auto &[bytes, memory] : free) {
                std::memset(memory, 0xff, bytes);
            }
        }
    }

private:
    struct Block {
        size_t bytes;
        int home;
        std::set<int> users;
    };

    struct Pending {
        void *memory;
        std::vector<Mark> marks;
    };

    static void give_back(void *memory);

    void *take(size_t bytes)
    {
        const Locked locked(lock);
        settle();
        const size_t size = (bytes + 511) / 512 * 512;
        auto &free = free_[current_stream];
        auto found = free.lower_bound(size);
        if (found != free.end()) { // of these the one that was freed last
            found = std::prev(free.upper_bound(found->first));
        } else {
            void *memory = std::aligned_alloc(512, size);
            std::memset(memory, 0xff, size);
            blocks_[memory] = {size, current_stream, {}};
            return memory;
        }
        void *memory = found->second;
        free.erase(found);
        streams.run(current_stream, [memory, bytes] { std::memset(memory, 0xff, bytes); });
        return memory;
    }

    void free(void *memory)
    {
        const Locked locked(lock);
        std::vector<Mark> marks;
        for (int user : std::exchange(blocks_[memory].users, {})) {
            marks.push_back(streams.mark(user));
        }
        if (marks.empty()) {
            offer(memory);
        } else {
            pending_.push_back({memory, marks});
        }
    }

    // What other streams have used is offered when they have done what they had by its end.
    void settle()
    {
        std::vector<Pending> held;
        std::vector<void *> over;
        for (Pending &pending : std::exchange(pending_, {})) {
            const bool is_over = std::all_of(pending.marks.begin(), pending.marks.end(),
                                             [](Mark mark) { return streams.is_reached(mark); });
            if (is_over) {
                over.push_back(pending.memory);
            } else {
                held.push_back(std::move(pending));
            }
        }
        pending_.insert(pending_.end(), held.begin(), held.end());
        for (void *memory : over) {
            offer(memory);
        }
    }

    void offer(void *memory)
    {
        const Block &block = blocks_[memory];
        free_[block.home].emplace(block.bytes, memory);
    }

    std::map<void *, Block> blocks_;
    std::map<int, std::multimap<size_t, void *>> free_; // by home and size
    std::vector<Pending> pending_;
};

inline Memory memory;

inline void Memory::give_back(void *freed)
{
    if (freed != nullptr) {
        memory.free(freed);
    }
}

} // namespace fake

#endif

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

// Freed memory goes to the next who asks in its stream; until then it holds bytes that are NaN in
// all floating types. Memory is never given back to the system.
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

    static size_t rounded(size_t bytes) { return (bytes + 511) / 512 * 512; }

    static void give_back(void *memory);

    void *take(size_t bytes)
    {
        const Locked locked(lock);
        settle();
        auto &free = free_[{current_stream, rounded(bytes)}];
        if (!free.empty()) {
            void *memory = free.back();
            free.pop_back();
            return memory;
        }
        void *memory = std::aligned_alloc(512, rounded(bytes));
        std::memset(memory, 0xff, rounded(bytes));
        blocks_[memory] = {rounded(bytes), current_stream, {}};
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
        streams.run(block.home,
                    [memory, bytes = block.bytes] { std::memset(memory, 0xff, bytes); });
        free_[{block.home, block.bytes}].push_back(memory);
    }

    std::map<void *, Block> blocks_;
    std::map<std::pair<int, size_t>, std::vector<void *>> free_;
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

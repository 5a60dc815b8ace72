// Signs of life in the store of a process group.
#include "libtorch/process_group.h"

#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <algorithm>
#include <cstring>

namespace fc {

namespace {

using Store = c10::intrusive_ptr<c10d::Store>;

// A connection of its own, since one that waits for an answer is locked. It is made by who needs it
// first: where the store's rank has died, torch tries for a minute.
struct Connection {
    Store given, own;

    c10d::Store &store()
    {
        if (!own) {
            own = c10::make_intrusive<c10d::PrefixStore>("fsdp_c/beats", again());
        }
        return *own;
    }

private:
    Store again() const
    {
        try {
            return given->clone();
        } catch (const c10::DistError &) {
            throw;
        } catch (const std::exception &) {
            return given; // a store in Python has no other connection
        }
    }
};

template <typename Body> fc_status answered(Body &&body)
{
    try {
        body();
        return FC_OK;
    } catch (const std::exception &error) {
        return fc_fail(FC_ERR_GROUP, "the store: %s", error.what());
    }
}

fc_status set(void *context, int rank, const char *words)
{
    return answered([&] {
        static_cast<Connection *>(context)->store().set(
            std::to_string(rank), std::vector<uint8_t>(words, words + std::strlen(words)));
    });
}

fc_status get(void *context, int rank, char *words)
{
    return answered([&] {
        c10d::Store &store = static_cast<Connection *>(context)->store();
        const std::string key = std::to_string(rank);
        if (store.check({key})) {
            const std::vector<uint8_t> found = store.get(key);
            const size_t n = std::min(found.size(), size_t(FC_BEATS_WORDS - 1));
            std::copy_n(found.begin(), n, words);
            words[n] = '\0';
        }
    });
}

} // namespace

fc_beats_ops group_beats(const std::string &group)
{
    auto *made = new Connection{c10d::resolve_process_group(group)->getStore(), {}};

    return {made, set, get, [](void *context) { delete static_cast<Connection *>(context); }};
}

} // namespace fc

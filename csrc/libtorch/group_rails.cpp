/* Messages between two ranks, by the process group's own send and receive. */
#include "libtorch/process_group.h"

#include "libtorch/unlocked.h"

#include <ATen/ops/from_blob.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <atomic>
#include <deque>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

namespace fc {

namespace {

/* The user's own messages have small numbers as tags, as a rule. */
int tag_of(uint32_t key)
{
    return static_cast<int>((key & 0x3fffffff) | 0x40000000);
}

struct Message {
    std::vector<at::Tensor> memory;
    c10::intrusive_ptr<c10d::Work> work;
};

struct Lines {
    std::deque<Message> sent, received; /* that nobody has awaited */
};

/* What has gone over one backend, which numbers it among its collectives. */
struct Traffic {
    c10::weak_intrusive_ptr<c10d::Backend> backend; /* ends with its process group */
    std::shared_ptr<std::atomic<size_t>> n_messages;
};

std::mutex traffics_mutex;
std::map<std::string, Traffic> traffics; /* by the group's name, which a later one may have */

struct GroupRails {
    c10::weak_intrusive_ptr<c10d::Backend> backend; /* ends with its process group */
    std::shared_ptr<std::atomic<size_t>> n_messages;
    std::vector<Lines> lines; /* by rank */
    /* Of the thread that waits and one that ends its wait. */
    std::mutex mutex;
    c10::intrusive_ptr<c10d::Work> awaited;
    bool is_interrupted = false;
};

GroupRails &rails_in(void *context)
{
    return *static_cast<GroupRails *>(context);
}

/* Other threads of the interpreter go on; an exception is what the group says. */
template <typename Body> fc_status unlocked(Body &&body)
{
    const Unlocked others_run;
    try {
        body();
        return FC_OK;
    } catch (const std::exception &error) {
        const std::string text = error.what();
        return fc_fail(FC_ERR_PEER, "%s", text.substr(0, text.find('\n')).c_str());
    }
}

Message message_of(const void *data, size_t bytes)
{
    return {{at::from_blob(const_cast<void *>(data), {static_cast<int64_t>(bytes)}, at::kByte)},
            {}};
}

c10::intrusive_ptr<c10d::Backend> backend_of(const GroupRails &rails)
{
    auto backend = rails.backend.lock();
    TORCH_CHECK(backend, "the process group has been destroyed");
    return backend;
}

fc_status rail_send(void *context, int rank, uint32_t key, const void *data, size_t bytes)
{
    GroupRails &rails = rails_in(context);
    return unlocked([&] {
        Message message = message_of(data, bytes);
        message.work = backend_of(rails)->send(message.memory, rank, tag_of(key));
        rails.n_messages->fetch_add(1, std::memory_order_relaxed);
        rails.lines[(size_t)rank].sent.push_back(std::move(message));
    });
}

fc_status rail_receive(void *context, int rank, uint32_t key, void *data, size_t bytes)
{
    GroupRails &rails = rails_in(context);
    return unlocked([&] {
        Message message = message_of(data, bytes);
        message.work = backend_of(rails)->recv(message.memory, rank, tag_of(key));
        rails.n_messages->fetch_add(1, std::memory_order_relaxed);
        rails.lines[(size_t)rank].received.push_back(std::move(message));
    });
}

void set_awaited(GroupRails &rails, c10::intrusive_ptr<c10d::Work> work)
{
    const std::lock_guard<std::mutex> guard(rails.mutex);
    rails.awaited = std::move(work);
    TORCH_CHECK(!rails.is_interrupted, "the wait was interrupted");
}

fc_status await_first(GroupRails &rails, std::deque<Message> &messages)
{
    return unlocked([&] {
        set_awaited(rails, messages.front().work);
        messages.front().work->wait(); /* up to the group's own deadline */
        set_awaited(rails, {});
        messages.pop_front();
    });
}

fc_status rail_await_sent(void *context, int rank)
{
    GroupRails &rails = rails_in(context);

    return await_first(rails, rails.lines[(size_t)rank].sent);
}

fc_status rail_await_received(void *context, int rank)
{
    GroupRails &rails = rails_in(context);

    return await_first(rails, rails.lines[(size_t)rank].received);
}

/* A backend whose works cannot be ended waits up to its deadline. */
void rail_interrupt(void *context)
{
    GroupRails &rails = rails_in(context);
    const std::lock_guard<std::mutex> guard(rails.mutex);

    rails.is_interrupted = true;
    if (rails.awaited) {
        (void)unlocked([&] { rails.awaited->abort(); });
    }
}

void rail_drop(void *context)
{
    GroupRails &rails = rails_in(context);
    const std::lock_guard<std::mutex> guard(rails.mutex);

    rails.awaited = {}; /* of a wait that failed: it would still be received */
    for (Lines &lines : rails.lines) {
        lines = {};
    }
}

void rail_release(void *context)
{
    delete static_cast<GroupRails *>(context);
}

} // namespace

fc_rail_ops group_rails(const std::string &group, int n_ranks)
{
    const auto found = c10d::resolve_process_group(group);
    const auto strong = found->getBackend(c10::DeviceType::CPU);
    auto backend = c10::weak_intrusive_ptr<c10d::Backend>(strong);
    const std::lock_guard<std::mutex> guard(traffics_mutex);
    const auto known = traffics.find(group);
    if (known == traffics.end() || known->second.backend.lock() != strong) {
        traffics.insert_or_assign(group,
                                  Traffic{backend, std::make_shared<std::atomic<size_t>>(0)});
    }
    auto n_messages = traffics.at(group).n_messages;

    return {.context = new GroupRails{std::move(backend), std::move(n_messages),
                                      std::vector<Lines>((size_t)n_ranks)},
            .send = rail_send,
            .receive = rail_receive,
            .await_sent = rail_await_sent,
            .await_received = rail_await_received,
            .interrupt = rail_interrupt,
            .drop = rail_drop,
            .release = rail_release};
}

size_t rail_messages(const std::string &group)
{
    const std::lock_guard<std::mutex> guard(traffics_mutex);
    const auto known = traffics.find(group);
    const bool is_there = known != traffics.end() && !known->second.backend.expired();

    return is_there ? known->second.n_messages->load(std::memory_order_relaxed) : 0;
}

} // namespace fc

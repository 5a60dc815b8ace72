/* Messages between two ranks, by the process group's own send and receive. */
#include "bind/comm/transport.h"

#include "bind/compat.h"
#include "bind/python/python.h"
#include "comm/rails.h"

#include <ATen/ops/from_blob.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <deque>
#include <exception>
#include <mutex>
#include <string>
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

struct GroupRails {
    c10::weak_intrusive_ptr<c10d::Backend> backend; /* ends with its process group */
    Ref local;                                      /* the transport that the rails borrow */
    std::vector<Lines> lines;                       /* by rank */
    /* Of the thread that waits and one that ends its wait. */
    std::mutex mutex;
    c10::intrusive_ptr<c10d::Work> awaited;
    bool is_interrupted = false;
};

GroupRails &rails_in(void *context)
{
    return *static_cast<GroupRails *>(context);
}

/* Without the GIL, whose other threads go on; an exception is what the group says. */
template <typename Body> fc_status without_gil(Body &&body)
{
    const NoGil no_gil;
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
    return without_gil([&] {
        Message message = message_of(data, bytes);
        message.work = backend_of(rails)->send(message.memory, rank, tag_of(key));
        rails.lines[(size_t)rank].sent.push_back(std::move(message));
    });
}

fc_status rail_receive(void *context, int rank, uint32_t key, void *data, size_t bytes)
{
    GroupRails &rails = rails_in(context);
    return without_gil([&] {
        Message message = message_of(data, bytes);
        message.work = backend_of(rails)->recv(message.memory, rank, tag_of(key));
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
    return without_gil([&] {
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
        (void)without_gil([&] { rails.awaited->abort(); });
    }
}

void rail_drop(void *context)
{
    for (Lines &lines : rails_in(context).lines) {
        lines = {};
    }
}

void rail_release(void *context)
{
    const Gil gil;
    delete static_cast<GroupRails *>(context);
}

} // namespace

fc_message_ops rails_over(const Ref &rails, const fc_transport_config &config,
                          const fc_message_ops &group)
{
    std::unique_ptr<fc_message_ops, void (*)(fc_message_ops *)> owner(
        new fc_message_ops(group), [](fc_message_ops *ops) {
            ops->release(ops->context);
            delete ops;
        });
    Fields fields(rails.get());
    const auto hosts = fields.values<integer_from>("hosts");
    const auto names = fields.values<text_from>("names");
    const Ref local = fields.object("local");
    const auto process_group = c10d::resolve_process_group(fields.text("group"));
    fields.end();
    fc_transport *over = local.get() == Py_None ? nullptr : transport_from_object(local.get());
    std::unique_ptr<GroupRails> own(new GroupRails{
        c10::weak_intrusive_ptr<c10d::Backend>(process_group->getBackend(c10::DeviceType::CPU)),
        local, std::vector<Lines>((size_t)config.n_ranks)});
    const fc_rails_config of = {.rank = config.rank,
                                .n_ranks = config.n_ranks,
                                .global_ranks = config.global_ranks,
                                .hosts = hosts.data(),
                                .names = names.data(),
                                .local = over,
                                .rails = {.context = own.release(),
                                          .send = rail_send,
                                          .receive = rail_receive,
                                          .await_sent = rail_await_sent,
                                          .await_received = rail_await_received,
                                          .interrupt = rail_interrupt,
                                          .drop = rail_drop,
                                          .release = rail_release},
                                .group = *owner};
    fc_message_ops ops;

    delete owner.release(); /* the core has them from here on */
    check(fc_rails_create(&of, &ops));
    return ops;
}

} // namespace fc

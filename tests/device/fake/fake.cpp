// A device for tests: host memory behind streams, and process groups with streams of their own.
#include "operators.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>

#include <pybind11/functional.h>

#include <map>

namespace fake {

// As NCCL's: asynchronous collectives are in a stream of the group, others in the current one.
// Each stream has ranks of its own to talk to, so that nothing orders collectives but events.
class Work final : public c10d::Work {
public:
    Work(Mark end, std::vector<at::Tensor> kept) : end_(end), kept_(std::move(kept)) {}

    bool isCompleted() override { return streams.is_reached(end_); }
    bool isSuccess() const override { return true; }
    bool wait(std::chrono::milliseconds) override
    {
        synchronize();
        return true;
    }
    void synchronize() override
    {
        if (streams.heeds(WAIT, current_stream, end_.stream)) {
            streams.wait(current_stream, end_);
        }
        kept_.clear();
    }

private:
    Mark end_;
    std::vector<at::Tensor> kept_; // until somebody has waited
};

// The backend on the host of a process group's n-th stream.
using MakeInner = std::function<c10::intrusive_ptr<c10d::Backend>(size_t n)>;

class Group final : public c10d::Backend {
public:
    Group(int rank, int size, MakeInner make)
        : Backend(rank, size), make_(std::move(make)), stream_(next_of_groups++)
    {
    }

    const std::string getBackendName() const override { return "streamed"; }

    c10::intrusive_ptr<c10d::Work> _allgather_base(at::Tensor &all, at::Tensor &own,
                                                   const c10d::AllgatherOptions &options) override
    {
        return later(options.asyncOp, {all, own}, [=](auto &inner, auto &tensors) {
            return ended(inner._allgather_base(tensors[0], tensors[1], options));
        });
    }

    // gloo's own is not begun before somebody waits for it.
    c10::intrusive_ptr<c10d::Work>
    _reduce_scatter_base(at::Tensor &part, at::Tensor &all,
                         const c10d::ReduceScatterOptions &options) override
    {
        return later(options.asyncOp, {part, all}, [=, rank = rank_](auto &inner, auto &tensors) {
            const at::Tensor target = tensors[0];
            std::vector<at::Tensor> sums = {tensors[1].clone()};
            const IsOver is_over = ended(inner.allreduce(sums, {.reduceOp = options.reduceOp}));
            const at::Tensor mine =
                sums[0].flatten().narrow(0, rank * target.numel(), target.numel());
            return [target, mine, is_over] {
                const bool answer = is_over();
                if (answer) {
                    plainly([&] { target.copy_(mine.view(target.sizes())); });
                }
                return answer;
            };
        });
    }

    c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor> &given,
                                             const c10d::AllreduceOptions &options) override
    {
        return later(options.asyncOp, given, [=](auto &inner, auto &tensors) {
            return ended(inner.allreduce(tensors, options));
        });
    }

    c10::intrusive_ptr<c10d::Work>
    allgather_into_tensor_coalesced(std::vector<at::Tensor> &all, std::vector<at::Tensor> &own,
                                    const c10d::AllgatherOptions &options) override
    {
        c10::intrusive_ptr<c10d::Work> last;
        for (size_t i = 0; i < all.size(); i++) {
            last = _allgather_base(all[i], own[i], options);
        }
        return last;
    }

    c10::intrusive_ptr<c10d::Work> alltoall_base(at::Tensor &to, at::Tensor &from,
                                                 std::vector<int64_t> &to_sizes,
                                                 std::vector<int64_t> &from_sizes,
                                                 const c10d::AllToAllOptions &options) override
    {
        return later(
            options.asyncOp, {to, from},
            [=, to_sizes = to_sizes, from_sizes = from_sizes](auto &inner, auto &tensors) mutable {
                return ended(
                    inner.alltoall_base(tensors[0], tensors[1], to_sizes, from_sizes, options));
            });
    }

    c10::intrusive_ptr<c10d::Work> broadcast(std::vector<at::Tensor> &given,
                                             const c10d::BroadcastOptions &options) override
    {
        return later(options.asyncOp, given, [=](auto &inner, auto &tensors) {
            return ended(inner.broadcast(tensors, options));
        });
    }

private:
    static IsOver ended(c10::intrusive_ptr<c10d::Work> work)
    {
        return [work] { return work->isCompleted() && work->wait(); };
    }

    template <typename Start>
    c10::intrusive_ptr<c10d::Work> later(bool is_async, const std::vector<at::Tensor> &given,
                                         Start start)
    {
        std::vector<at::Tensor> host;
        for (const at::Tensor &each : given) {
            host.push_back(on_host(each));
        }
        const int stream = is_async ? stream_ : current_stream;
        streams.wait(stream, streams.mark(current_stream));
        streams.enqueue(stream, [inner = inner_of(stream), host, start]() mutable {
            IsOver is_over;
            plainly([&] { is_over = start(*inner, host); });
            return is_over;
        });
        if (!is_async) {
            return {};
        }
        return c10::make_intrusive<Work>(streams.mark(stream), given);
    }

    // Ranks use streams for the first time in the same order.
    const c10::intrusive_ptr<c10d::Backend> &inner_of(int stream)
    {
        c10::intrusive_ptr<c10d::Backend> &inner = inner_[stream];
        if (!inner) {
            inner = make_(inner_.size() - 1);
        }
        return inner;
    }

    MakeInner make_;
    std::map<int, c10::intrusive_ptr<c10d::Backend>> inner_; // by stream
    int stream_;
};

// What a later model asks for has the numbers of the first one's.
static void start_again()
{
    streams.synchronize();
    memory.wipe();
    next_pooled = first_pooled;
    next_new = first_new;
}

static std::vector<std::tuple<int, int, int>> said()
{
    std::vector<std::tuple<int, int, int>> all;
    for (const Said &each : streams.said()) {
        all.emplace_back(each.kind, each.stream, each.of);
    }
    return all;
}

static void let_others_run(void (*body)())
{
    const py::gil_scoped_release released;
    body();
}

} // namespace fake

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module)
{
    using namespace fake;
    at::RegisterPrivateUse1HooksInterface(new Hooks());
    c10::SetAllocator(c10::DeviceType::PrivateUse1, &memory);
    module.def("set_order", [](int order, const std::set<int> &ahead, uint32_t seed) {
        streams.set_order(static_cast<Order>(order), ahead, seed);
    });
    module.def("watch",
               [](int kind, int dropped) { streams.watch(static_cast<Kind>(kind), dropped); });
    module.def("said", &said);
    module.def("start_again", [] { let_others_run(start_again); });
    module.def("synchronize", [] { let_others_run([] { streams.synchronize(); }); });
    module.def("group", [](int rank, int size, const MakeInner &make) {
        return c10::intrusive_ptr<c10d::Backend>(c10::make_intrusive<Group>(rank, size, make));
    });
}

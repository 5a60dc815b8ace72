// Notices gradients that no pre-backward has announced, when autograd has written one.
#include "bind/fsdp/arrivals.h"

#include "bind/fsdp/state.h"
#include "bind/python/untraced.h"

#include <torch/csrc/autograd/variable.h>

#include <utility>

namespace fc {

namespace {

void tell_of_arrival(const Arrivals &arrivals)
{
    Gil gil;
    const Untraced untraced;
    PyObject *state = arrivals.state ? PyWeakref_GetObject(arrivals.state.get()) : Py_None;
    if (state == Py_None) {
        raise_error(PyExc_RuntimeError,
                    "backward goes through a graph of FSDP unit '%s' from before its parameters "
                    "were replaced or moved, so that its gradients belong to nothing: call "
                    "forward again before backward",
                    arrivals.unit.c_str());
    }
    const Ref kept = Ref::borrow(state);
    state_on_arrival(reinterpret_cast<StateObject *>(state));
}

struct Watch : public ArrivalHook {
    std::shared_ptr<Arrivals> arrivals;
    std::unique_ptr<ArrivalHook> users;

    void operator()(const torch::autograd::Variable &param) override
    {
        if (!arrivals->is_expected.load(std::memory_order_relaxed)) {
            tell_of_arrival(*arrivals);
        }
        if (users != nullptr) {
            (*users)(param);
        }
    }
};

} // namespace

const ArrivalHook *watch_arrivals(const at::Tensor &param,
                                  const std::shared_ptr<Arrivals> &arrivals,
                                  const ArrivalHook *installed)
{
    std::unique_ptr<ArrivalHook> &hook = torch::autograd::impl::post_acc_grad_hooks(param);
    if (hook.get() != installed || installed == nullptr) {
        auto watch = std::make_unique<Watch>();
        watch->arrivals = arrivals;
        watch->users = std::move(hook);
        hook = std::move(watch);
    }
    return hook.get();
}

} // namespace fc

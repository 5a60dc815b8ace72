// Autograd's side of the hooks: on the nodes between units, an identity node on inputs where these
// do not do, the final callback.
#include "bind/fsdp/state.h"
#include "bind/python/untraced.h"
#include "libtorch/versions.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <typeinfo>
#include <unordered_set>

namespace fc {

// Keeps a root and its states alive for autograd's nodes, which die on any thread: one reference
// of Python's for all nodes, so that the interpreter's lock is asked for once, after the last.
class RootHold : NoCopy {
public:
    explicit RootHold(RootObject *root) : root_(root) { Py_INCREF(root); }
    const RootObject *root() const { return root_; }
    ~RootHold()
    {
        if (Py_IsInitialized() && !is_left_behind()) {
            Gil gil;
            Py_DECREF(root_);
        }
    }

private:
    RootObject *root_;
};

namespace {

using torch::autograd::Node;
using torch::autograd::variable_list;

// With the GIL held.
std::shared_ptr<RootHold> hold_of(RootObject *root)
{
    std::shared_ptr<RootHold> hold = root->hold.lock();
    if (hold == nullptr) {
        hold = std::make_shared<RootHold>(root);
        root->hold = hold;
    }
    return hold;
}

// Keeps a state alive, which is of the root; made with the GIL held.
class StateHandle {
public:
    explicit StateHandle(StateObject *state) : state_(state), hold_(hold_of(state->root)) {}
    StateObject *get() const { return state_; }

private:
    StateObject *state_;
    std::shared_ptr<RootHold> hold_;
};

// The nodes of the running backward that get gradients from several others.
const std::unordered_set<const Node *> &forks()
{
    static int64_t graph_task = -1;
    static std::unordered_set<const Node *> found;
    const int64_t current = torch::autograd::get_current_graph_task_id();
    if (std::exchange(graph_task, current) == current) {
        return found;
    }
    found.clear();
    std::unordered_set<const Node *> seen;
    for (const Node *node : *torch::autograd::get_current_graph_task_nodes_in_graph()) {
        for (const torch::autograd::Edge &edge : node->next_edges()) {
            if (edge.is_valid() && !seen.insert(edge.function.get()).second) {
                found.insert(edge.function.get());
            }
        }
    }
    return found;
}

// A sum of gradients depends on its order in the last bit, and the identity node adds up those of
// the unit first. So it is left out only for a unit that is all that reads its input.
void learn_of_input(StateObject *state, const torch::autograd::edge_list &inputs)
{
    GroupObject *group = state->group;
    const RootObject *root = state->root;
    if (group != nullptr && root != nullptr &&
        torch::autograd::get_current_graph_task_id() == root->graph_task &&
        fc_root_asks_for_input(&root->course, &group->course)) {
        fc_root_note_input(&root->course, &group->course,
                           inputs.size() == 1 && inputs[0].is_valid() &&
                               forks().count(inputs[0].function.get()) == 0);
    }
}

using torch::dynamo::autograd::CompiledNodeArgs;

// Its graph has no place for collectives; torch's own leaves gradients unreduced there.
void refuse_compiled_autograd()
{
    TORCH_CHECK_NOT_IMPLEMENTED(
        false,
        "compiled autograd cannot run the backward of sharded units: call backward() outside of"
        " torch._dynamo.compiled_autograd, which leaves the forward compiled");
}

// Identity on a unit's inputs. Its backward runs when the unit's own backward is through.
struct PostBackward : public Node {
    StateHandle state;
    std::vector<bool> gets_zeros; // each input, where the unit has not used it

    PostBackward(StateObject *s, torch::autograd::edge_list &&next, std::vector<bool> &&zeros)
        : Node(std::move(next)), state(s), gets_zeros(std::move(zeros))
    {
    }
    variable_list apply(variable_list &&grads) override
    {
        fill_in(grads);
        Gil gil;
        const Untraced untraced;
        state_post_backward(state.get());
        learn_of_input(state.get(), next_edges());
        return std::move(grads);
    }
    std::string name() const override { return "RegisterPostBackwardFunctionBackward"; }
    void compiled_args(CompiledNodeArgs &) const override { refuse_compiled_autograd(); }

private:
    // As torch's autograd.Function: an input that the unit has not used gets zeros, and so does all
    // that lies behind it. A DTensor's zeros would be a plain tensor of the global shape, which its
    // operators refuse: there it gets none, as in the unsharded model.
    void fill_in(variable_list &grads) const
    {
        for (size_t i = 0; i < grads.size(); i++) {
            if (!grads[i].defined() && gets_zeros[i]) {
                grads[i] = input_metadata(i).zeros_like();
            }
        }
    }
};

// Of all units of the state; zero without any.
uint64_t updates_of(const StateObject *state, uint64_t (Unit::*n)() const)
{
    uint64_t sum = 0;
    each_group(state, [&](const GroupObject *group) { sum += (group->unit->*n)(); });
    return sum;
}

// A backward is about to go through a graph of before the unit's newest step. Where that has saved
// a weight autograd raises, as for a module that is not sharded, and knows no unit's name.
void warn_if_outdated(const StateObject *state, uint64_t updates)
{
    GroupObject *group = bound_from(state->group);
    if (group != nullptr && updates_of(state, &Unit::n_updates) != updates) {
        ask_python(Call::warn_of_outdated, group);
    }
}

// Between two units: on the node whose gradient leaves one and enters the other. On the node, not
// the tensor: an in-place operation on a view of the output cannot lose it. Among the node's hooks
// for tensors: those that a user puts on the output afterwards run after it.
struct Border : public torch::autograd::FunctionPreHook {
    StateObject *left = nullptr;     // whose backward is through; null: nobody's
    StateObject *entered = nullptr;  // whose backward begins; null: nobody's
    uint64_t steps = 0, updates = 0; // of optimizers, when that one's forward ended

    // Keeps the state alive, as one of the two.
    StateObject *keep(StateObject *state)
    {
        if (hold_ == nullptr || hold_->root() != state->root) { // mostly both are of one root
            (hold_ == nullptr ? hold_ : other_hold_) = hold_of(state->root);
        }
        return state;
    }
    variable_list operator()(const variable_list &grads) override
    {
        Gil gil;
        const Untraced untraced;
        if (left != nullptr && training_of(left) == FC_TRAINING_PRE_BACKWARD) {
            state_post_backward(left);
        }
        if (entered != nullptr) {
            if (steps != n_steps()) {
                warn_if_outdated(entered, updates);
            }
            state_pre_backward(entered);
        }
        return grads;
    }
    void compiled_args(CompiledNodeArgs &) const override { refuse_compiled_autograd(); }

private:
    std::shared_ptr<RootHold> hold_, other_hold_;
};

// On a node inside of a unit, where most backwards come after having passed a border.
struct InnerBorder : public torch::autograd::FunctionPreHook {
    StateHandle state;
    std::shared_ptr<Arrivals> arrivals;

    explicit InnerBorder(StateObject *s) : state(s), arrivals(s->group->unit->shared_arrivals()) {}
    variable_list operator()(const variable_list &grads) override
    {
        if (!arrivals->is_expected.load(std::memory_order_relaxed)) {
            Gil gil;
            const Untraced untraced;
            state_pre_backward(state.get());
        }
        return grads;
    }
    void compiled_args(CompiledNodeArgs &) const override { refuse_compiled_autograd(); }
};

bool has_border(Node *node)
{
    const auto &hooks = node->tensor_pre_hooks();
    return std::any_of(hooks.begin(), hooks.end(), [](const auto &hook) {
        return typeid(*hook) == typeid(InnerBorder) || typeid(*hook) == typeid(Border);
    });
}

std::unique_ptr<Border> entry_to(StateObject *state)
{
    auto border = std::make_unique<Border>();
    border->entered = border->keep(state);
    border->steps = n_steps();
    border->updates = updates_of(state, &Unit::updates_seen);
    return border;
}

// Lives in the graph task's list of final callbacks. If it goes without having run, backward has
// failed. A thread of autograd's may be the last to hold the task, and be late: a forward that
// comes before it has found the failure by itself, and is left alone.
class FinalCallback : NoCopy {
public:
    explicit FinalCallback(RootObject *root) : root_(root)
    {
        Py_INCREF(root);
        root->context->final_callback = this;
    }
    ~FinalCallback()
    {
        if (!Py_IsInitialized() || is_left_behind()) {
            return;
        }
        Gil gil;
        if (take_place()) {
            fc_root_fail(&root_->course);
        }
        Py_DECREF(root_);
    }
    void run()
    {
        Gil gil;
        const Untraced untraced;
        take_place();
        root_end_backward(root_);
    }

private:
    // False: somebody else has, or it was never the newest.
    bool take_place()
    {
        const void *&place = root_->context->final_callback;
        const bool is_its = place == this;
        place = is_its ? nullptr : place;
        return is_its;
    }

    RootObject *root_;
};

} // namespace

bool end_at_producer(StateObject *state, const at::Tensor &input)
{
    const auto &node = input.grad_fn();
    // A leaf's node may be gone before backward; one of another thread may come before the unit's.
    if (!node || node->sequence_nr() >= state->entry_sequence) {
        return false;
    }
    // Before all hooks of the node, as the identity node's backward would be.
    auto &hooks = node->tensor_pre_hooks();
    if (hooks.empty() || typeid(*hooks.front()) != typeid(Border)) {
        hooks.insert(hooks.begin(), std::make_unique<Border>());
    }
    auto *border = static_cast<Border *>(hooks.front().get());
    if (border->left != nullptr) {
        return false; // another unit's input too: that one would keep this one's gradients waiting
    }
    border->left = border->keep(state);
    return true;
}

Tensors route_through_node(StateObject *state, const BorrowedTensors &tensors)
{
    Tensors routed;
    torch::autograd::edge_list edges;
    edges.reserve(tensors.list.size());
    std::vector<bool> gets_zeros;
    for (const at::Tensor *tensor : tensors.list) {
        edges.push_back(torch::autograd::impl::gradient_edge(*tensor));
        routed.push_back(*tensor);
        gets_zeros.push_back(state->fills_in_gradients &&
                             !tensor->key_set().has(c10::DispatchKey::Python) &&
                             !tensor->is_nested());
    }
    NodePtr node = make_node<PostBackward>(state, std::move(edges), std::move(gets_zeros));
    for (at::Tensor &tensor : routed) {
        at::Tensor out;
        {
            at::NoGradGuard no_grad;
            out = tensor.view_as(tensor);
        }
        torch::autograd::set_history(out, node);
        // In-place changes of an input inside the unit would escape the graph outside of it: refuse
        // them, as torch does.
        if (auto *view = torch::autograd::impl::get_view_autograd_meta(out)) {
            view->set_creation_meta(routed.size() > 1
                                        ? torch::autograd::CreationMeta::MULTI_OUTPUT_NODE
                                        : torch::autograd::CreationMeta::IN_CUSTOM_FUNCTION);
        }
        tensor = std::move(out);
    }
    return routed;
}

// On a leaf. It may have hooks already: those of users, and of the forward before where that gave
// out the same one, such as a parameter.
static void hook_leaf(StateObject *state, const at::Tensor &leaf)
{
    auto &hooks = torch::autograd::impl::hooks(leaf);
    std::erase_if(hooks, [=](const auto &hook) {
        return typeid(*hook) == typeid(Border) &&
               static_cast<Border *>(hook.get())->entered == state;
    });
    hooks.push_back(entry_to(state));
}

void hook_outputs(StateObject *state, const BorrowedTensors &tensors)
{
    for (const at::Tensor *output : tensors.list) {
        const at::Tensor &tensor = *output;
        if (const auto &node = tensor.grad_fn()) {
            node->add_tensor_pre_hook(entry_to(state));
            // Changing a view in place goes around its node: then the base's node is the first of
            // this unit's.
            const bool is_view = tensor.is_view();
            const NodePtr base = is_view ? tensor._base().grad_fn() : NodePtr();
            if (base && base->sequence_nr() >= state->entry_sequence) {
                base->add_tensor_pre_hook(entry_to(state));
            }
        } else {
            hook_leaf(state, tensor);
        }
    }
}

void hook_nodes_inside(StateObject *state, const BorrowedTensors &outputs)
{
    std::vector<Node *> todo;
    std::unordered_set<Node *> seen;
    for (const at::Tensor *tensor : outputs.list) {
        todo.push_back(tensor->grad_fn().get());
    }
    while (!todo.empty()) {
        Node *node = todo.back();
        todo.pop_back();
        // A leaf's node has no edges and the largest number.
        if (node == nullptr || node->sequence_nr() < state->entry_sequence ||
            node->num_outputs() == 0 || !seen.insert(node).second) {
            continue;
        }
        // Nodes of a unit inside of this one have that one's.
        if (!has_border(node)) {
            node->add_tensor_pre_hook(std::make_unique<InnerBorder>(state));
        }
        for (const torch::autograd::Edge &edge : node->next_edges()) {
            todo.push_back(edge.function.get());
        }
    }
}

void hook_params(StateObject *state)
{
    each_group(state, [&](const GroupObject *group) {
        for (const Param &param : group->unit->params()) {
            if (param.unsharded_tensor.requires_grad()) {
                hook_leaf(state, param.unsharded_tensor);
            }
        }
    });
}

void find_failed_backward(RootObject *root)
{
    if (root->context->final_callback != nullptr && !in_autograd_backward()) {
        root->context->final_callback = nullptr;
        fc_root_fail(&root->course);
    }
}

void queue_final_callback(RootObject *root)
{
    fc_root_note_awaited(&root->course);
    root->graph_task = torch::autograd::get_current_graph_task_id();
    auto callback = std::make_shared<FinalCallback>(root);
    torch::autograd::Engine::get_default_engine().queue_callback([callback] { callback->run(); });
}

} // namespace fc

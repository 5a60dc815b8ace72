"""I: what fully_shard does when it is called, what it leaves on modules, and the first forward."""

import copy
import gc
import pickle
import warnings
import weakref
from typing import Any

import models
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from harness import cached_mesh, implementation
from models import Block, Net, data
from parity import on_ranks
from torch import nn
from torch.distributed._composable import replicate
from torch.distributed._composable.contract import _get_registry
from torch.distributed._composable_state import _get_module_state
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from behaviour.pairs import (
    agree,
    backward,
    chain,
    full,
    gradients,
    hsdp_mesh,
    linear,
    local,
    own,
    raised,
    registered,
    sharded,
    shards,
    weights,
)


class Twice(nn.Module):
    """One module under two names, and one parameter under two names of one module."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b = self.a
        self.c = nn.Linear(4, 4, bias=False)
        self.d = nn.Linear(4, 4, bias=False)
        self.d.weight = self.c.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.d(self.c(self.b(self.a(x))))


def spec_of(parameter: nn.Parameter) -> Any:
    assert isinstance(parameter, DTensor) and type(parameter) is nn.Parameter or True
    mesh = parameter.device_mesh
    return (
        (tuple(parameter.shape), parameter.stride(), str(parameter.placements)),
        (tuple(mesh.shape), mesh.mesh_dim_names),
        (parameter.to_local().is_contiguous(), local(parameter)),
    )


@on_ranks(1)
def test_i1_i2_i3_i5_what_a_unit_manages(rank: int, n_ranks: int) -> None:
    """Post-order, bottom-up: the outer call takes the rest; DDP's modules are left alone."""

    def see(fsdp: Any) -> Any:
        model = sharded(fsdp, shard=models.shard_deep)
        model(data(rank))
        found = []
        for module in model.modules():
            state = _get_module_state(module)
            if isinstance(module, fsdp.FSDPModule):
                found.append(
                    [p._param_fqn for g in state._fsdp_param_groups for p in g.fsdp_params]
                )
        whole = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        replicate(whole[0])
        fsdp.fully_shard(whole)
        rest = fsdp.fully_shard(nn.Sequential(fsdp.fully_shard(nn.Linear(4, 4))))
        state = _get_module_state(rest)
        hooks = len(rest._forward_pre_hooks), len(rest._forward_hooks)
        return (
            found,
            [isinstance(p, DTensor) for p in whole.parameters()],
            (
                len(state._fsdp_param_groups),
                hooks,
                isinstance(rest, fsdp.FSDPModule),
            ),
        )

    found, is_sharded, empty = agree(see)
    assert found[0] == ["stem.weight", "stem.bias", "scale"]
    assert found[1] == [
        f"blocks.0.{name}" for name in ("norm.weight", "norm.bias", "up.weight", "up.bias")
    ]
    assert is_sharded == [False, False, True, True] and empty == (0, (1, 1), True)


@on_ranks(2)
def test_i4_i8_shared_modules_and_parameters(rank: int, n_ranks: int) -> None:
    def see(fsdp: Any) -> Any:
        model = sharded(fsdp, Twice, models.shard_root)
        tied = [model.a is model.b, model.c.weight is model.d.weight]
        names = [name for name, _ in model.named_parameters()]
        seen: list[Any] = []
        model.d.register_forward_hook(
            lambda *_: seen.append((model.c.weight is model.d.weight, own(model.c), own(model.b)))
        )
        parameters = shards(model)
        for step in range(2):
            backward(model, data(rank, step, 2, 4))
        model.reshard()
        infos = [p._module_info for p in model._get_fsdp_state()._fsdp_param_group.fsdp_params]
        shared = [(info.shared_param_names, len(info.shared_modules)) for info in infos]
        tied += [model.c.weight is model.d.weight]
        return tied, names, list(model.state_dict()), seen, shared, gradients(parameters)

    tied, names, keys, seen, *_ = agree(see)
    assert tied == [True] * 3 and names == ["a.weight", "a.bias", "c.weight"]
    assert len(keys) == 6 and seen[0] == (True, "unsharded", "unsharded")


@on_ranks(2)
def test_i6_ignored_parameters(rank: int, n_ranks: int) -> None:
    def see(fsdp: Any) -> Any:
        model = Net(2)
        ignored = {model.stem.weight, *model.blocks[0].norm.parameters()}
        objects = {id(parameter) for parameter in ignored}
        policy = fsdp.MixedPrecisionPolicy(param_dtype=torch.float64)
        models.shard_blocks(model, fsdp, ignored_params=ignored, mp_policy=policy)
        model.to(torch.float32)
        plain = {n for n, p in model.named_parameters() if not isinstance(p, DTensor)}
        assert {id(p) for p in model.parameters() if not isinstance(p, DTensor)} == objects
        flags = [n for n, m in model.named_modules() if "_is_fsdp_managed_module" in vars(m)]
        return sorted(plain), flags

    plain, flags = agree(see)
    assert plain == ["blocks.0.norm.bias", "blocks.0.norm.weight", "stem.weight"]
    assert "blocks.0.norm" not in flags and "stem" in flags

    def train(fsdp: Any) -> Any:
        model = sharded(fsdp, Net, lambda m, f: models.shard_blocks(m, f, ignored_params={m.scale}))
        parameters = shards(model)
        backward(model, data(rank))
        return gradients(parameters)

    agree(train)


@on_ranks(2)
def test_i7_parameters_that_come_later(rank: int, n_ranks: int) -> None:
    def see(fsdp: Any) -> Any:
        model = linear(fsdp)
        model.late = nn.Parameter(torch.full((4,), 2.0))
        new = distribute_tensor(torch.full((4, 4), 3.0), cached_mesh((n_ranks,)), [Shard(0)])
        model.weight = nn.Parameter(new)
        model.register_forward_hook(lambda m, args, out: out * m.late)
        backward(model, torch.full((1, 4), rank + 1.0))
        model.reshard()
        return local(model.late.grad), local(model.weight.grad), full(model.weight)

    assert (agree(see)[2] == 3).all()


@on_ranks(2)
def test_i9_attributes_and_hooks_of_the_originals(rank: int, n_ranks: int) -> None:
    """Torch makes new parameters without either; ours keeps attributes and warns of hooks."""

    def see(fsdp: Any) -> Any:
        model = nn.Linear(4, 4)
        model.weight.mark = "mine"
        model.bias.register_hook(lambda grad: fired.append(grad))
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            fsdp.fully_shard(model)
        kept = [getattr(model.weight, "mark", None)]
        backward(model, torch.ones(2, 4))
        model.unshard()
        kept.append(getattr(model.weight, "mark", None))
        model.reshard()
        return kept, ["bias" in str(w.message) for w in seen], len(fired)

    fired: list[Any] = []
    assert see(torch_fsdp) == ([None, None], [], 0)
    if (ours := implementation()) is not torch_fsdp:
        assert see(ours) == (["mine", "mine"], [True], 0)


@on_ranks(2)
def test_i10_requires_grad(rank: int, n_ranks: int) -> None:
    def see(fsdp: Any) -> Any:
        net = nn.Linear(4, 4)
        net.bias.requires_grad_(False)
        model = fsdp.fully_shard(net)
        seen = []
        model.register_forward_hook(
            lambda m, *_: seen.append((m.weight.requires_grad, m.bias.requires_grad))
        )
        parameters = shards(model)
        for name, is_trained in (("bias", False), ("bias", True), ("weight", False)):
            parameters[name].requires_grad_(is_trained)
            backward(model, torch.ones(2, 4))
            model.reshard()
            seen.append({n: p.grad is not None for n, p in parameters.items()})
            model.zero_grad()
        return seen

    seen = agree(see)
    assert seen[0] == (True, False) and seen[2] == (True, True) and seen[4] == (False, True)


@on_ranks(4)
def test_i11_i12_i13_i14_i15_shards(rank: int, n_ranks: int) -> None:
    """Chunks as torch.chunk's, copied, contiguous, zero-padded; DTensors of the mesh."""

    def see(fsdp: Any) -> Any:
        seen = []
        for mesh in (None, hsdp_mesh()):
            for dim in (0, 1):
                net = nn.Linear(8 if dim else 3, 5, bias=False)
                with torch.no_grad():
                    net.weight.copy_(torch.arange(float(net.weight.numel())).view_as(net.weight))
                old = weakref.ref(net.weight.untyped_storage())
                old_tensor = weakref.ref(net.weight)
                model = fsdp.fully_shard(
                    net, mesh=mesh, shard_placement_fn=lambda p, d=dim: Shard(d)
                )
                gc.collect()
                assert old_tensor() is None and (old() is None or dim >= 0)
                param = model._get_fsdp_state()._fsdp_param_group.fsdp_params[0]
                padded = param._sharded_param_data
                seen += [spec_of(model.weight), padded, padded.untyped_storage().nbytes()]
        return seen

    seen = agree(see)
    rows = [2, 2, 1, 0][rank]
    assert seen[0][2][1].shape == (rows, 3) and seen[1].shape == (6,) and seen[2] == 24
    assert seen[0][0][2] == "(Shard(dim=0),)" and "Replicate(), Shard(dim=0)" in seen[6][0][2]


@on_ranks(1)
def test_i16_modules_that_set_attributes_their_own_way(rank: int, n_ranks: int) -> None:
    def see(fsdp: Any) -> Any:
        names: list[str] = []

        class Noting(nn.Linear):
            def __setattr__(self, name: str, value: Any) -> None:
                if isinstance(value, nn.Parameter):
                    names.append(f"{name} {type(value.data).__name__}")
                super().__setattr__(name, value)

        model = fsdp.fully_shard(Noting(4, 4, bias=False))
        backward(model, torch.ones(1, 4))
        model.reshard()
        return names

    assert "weight DTensor" in agree(see)


@on_ranks(2)
def test_i17_i21_buffers_and_device(rank: int, n_ranks: int) -> None:
    def see(fsdp: Any) -> Any:
        net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        net.register_buffer("hidden", torch.full((2,), float(rank)), persistent=False)
        before = {name: id(buffer) for name, buffer in net.named_buffers()}
        model = fsdp.fully_shard(net)
        assert before == {name: id(buffer) for name, buffer in model.named_buffers()}
        model(torch.full((2, 4), rank + 1.0) * torch.arange(2).view(2, 1))
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        return str(model._get_fsdp_state()._device), buffers

    assert (agree(see)[1]["hidden"] == rank).all()


@on_ranks(4)
def test_i22_i23_meshes(rank: int, n_ranks: int) -> None:
    """Replicas keep what they had; meshes made from groups; the shard dim is found by its name."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    across = [dist.new_group([0, 2]), dist.new_group([1, 3])]

    def see(fsdp: Any) -> Any:
        ranks = torch.arange(4).view(2, 2)
        two_dims = DeviceMesh.from_group(
            [across[rank % 2], pairs[rank // 2]], "cpu", mesh=ranks, mesh_dim_names=("r", "s")
        )
        one_dim = DeviceMesh.from_group(pairs[rank // 2], "cpu")
        seen = []
        for mesh in (one_dim, two_dims):
            model = nn.Linear(4, 4, bias=False)
            with torch.no_grad():
                model.weight.fill_(rank)
            fsdp.fully_shard(model, mesh=mesh)
            seen.append(local(model.weight))
            backward(model, torch.full((1, 4), rank + 1.0))
            model.reshard()
            seen.append(local(model.weight.grad))
        unnamed = DeviceMesh("cpu", ranks)
        return seen, raised(lambda: fsdp.fully_shard(nn.Linear(4, 4), mesh=unnamed))

    seen, error = agree(see)
    assert (seen[2] == rank).all() and error != "nothing"


@on_ranks(1)
def test_i25_i26_i27_i28_i31_the_class(rank: int, n_ranks: int) -> None:
    def see(fsdp: Any) -> Any:
        model = sharded(
            fsdp, lambda: nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))), models.shard_root
        )
        other = fsdp.fully_shard(nn.Sequential(nn.Linear(4, 4)))
        cls = type(model)
        assert type(other) is cls and issubclass(cls, torch_fsdp.FSDPModule)
        registry, plain = _get_registry(model), _get_registry(model[0])
        assert plain is None and _get_module_state(model) is fsdp.fully_shard.state(model)
        part = model[:2]
        flags = [(m._is_fsdp_managed_module, m._fsdp_use_orig_params) for m in model.modules()]
        return (
            (cls.__name__, cls.__qualname__, cls.__module__),
            [base.__name__ for base in cls.__mro__[:4]],
            (repr(model), type(part).__name__, len(part), part[0] is model[0]),
            (list(registry), [type(item).__name__ for item in registry.values()], flags),
        )

    names, bases, (text, part, *_), _ = agree(see)
    assert names[0] == "FSDPSequential" and bases[1:3] == ["FSDPModule", "Sequential"]
    assert text.startswith("FSDPSequential(") and part == "Sequential" and "FSDPLinear" not in text


@on_ranks(1)
def test_i29_i30_copies_are_refused(rank: int, n_ranks: int) -> None:
    def see(fsdp: Any) -> Any:
        model = fsdp.fully_shard(nn.Linear(4, 4))
        text = "does not support deepcopy"
        return [
            raised(lambda: copy.deepcopy(model), text),
            raised(lambda: copy.deepcopy(nn.Sequential(model)), text),
            raised(lambda: pickle.dumps(model)),
        ]

    assert "nothing" not in agree(see)


@on_ranks(1)
def test_i32_i33_hooks(rank: int, n_ranks: int) -> None:
    """How many, and where they stand among the user's."""

    def see(fsdp: Any) -> Any:
        seen: list[Any] = []
        net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, bias=False))

        def note(when: str) -> Any:
            return lambda module, *_: seen.append((when, own(module[0])))

        net.register_forward_pre_hook(note("pre before"))
        net.register_forward_hook(note("post before"))
        model = fsdp.fully_shard(net, reshard_after_forward=True)
        net.register_forward_pre_hook(note("pre after"))
        net.register_forward_hook(note("post after"))

        def count() -> None:
            for module in model.modules():
                kinds = (
                    module._forward_pre_hooks,
                    module._forward_pre_hooks_with_kwargs,
                    module._forward_hooks,
                    module._forward_hooks_always_called,
                    module._state_dict_pre_hooks,
                    module._load_state_dict_pre_hooks,
                    module._load_state_dict_post_hooks,
                )
                seen.append([len(kind) for kind in kinds])

        count()
        model(torch.ones(1, 4))
        count()
        group = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        fsdp.fully_shard([group[0], group[1]])
        fsdp.fully_shard(group)
        seen += [len(group[1]._forward_pre_hooks), len(group[1]._forward_hooks)]
        seen.append(len(group[1]._forward_hooks_always_called))
        group[1].register_forward_pre_hook(lambda *_: 1 / 0)
        seen.append(raised(lambda: group(torch.ones(1, 4))))
        return seen, registered(group)

    seen, _ = agree(see)
    assert [state for when, state in seen[3:7]] == ["unsharded"] * 3 + ["sharded"]
    assert seen[-4:] == [1, 1, 1, "ZeroDivisionError"]


@on_ranks(2)
def test_i34_i35_moves_before_the_first_forward(rank: int, n_ranks: int) -> None:
    def see(fsdp: Any) -> Any:
        seen: list[Any] = []
        for move in (
            lambda m: m.double(),
            lambda m: m.to(torch.float64).cpu(),
            lambda m: [child.double() for child in m.children()],
        ):
            net = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 4))
            with torch.no_grad():
                for parameter in net.parameters():
                    parameter.fill_(0.5)
            model = fsdp.fully_shard(net)
            before = shards(model)
            move(model)
            assert all(before[n] is p for n, p in model.named_parameters())
            seen.append(registered(model))
            backward(model, data(rank, 0, 2, 4, dtype=torch.float64))
            seen += [gradients(before), weights(before)]
        return seen

    assert agree(see)[1]["0.weight"].dtype is torch.float64


@on_ranks(2)
def test_i34_a_move_after_the_first_forward(rank: int, n_ranks: int) -> None:
    """Refused by torch in the next step; here the unit takes the new dtype."""

    def see(fsdp: Any) -> Any:
        model = chain(fsdp)
        parameters = shards(model)
        backward(model, data(rank, 0, 2, 4))
        model.zero_grad()
        model.double()
        outcome = raised(lambda: backward(model, data(rank, 0, 2, 4, dtype=torch.float64)))
        return outcome, gradients(parameters)

    theirs = see(torch_fsdp)[0]
    import fsdp_c

    ours, grads = see(fsdp_c)
    assert theirs == "RuntimeError" and ours == "nothing"
    assert all(grad.dtype is torch.float64 for grad in grads.values())


@on_ranks(2)
def test_i36_loading_by_assignment(rank: int, n_ranks: int) -> None:
    def see(fsdp: Any) -> Any:
        model = chain(fsdp)
        for _ in range(2):  # before the first forward, and after it
            state = {name: p.detach() * 0 + 2 for name, p in shards(model).items()}
            old = shards(model)
            model.load_state_dict(state, assign=True)
            assert all(old[name] is not p for name, p in shards(model).items())
            parameters = shards(model)
            backward(model, data(rank, 0, 2, 4))
            model.reshard()
        return gradients(parameters), weights(parameters)

    assert (agree(see)[1]["0.weight"] == 2).all()


@on_ranks(2)
def test_i38_deleted_models_free_their_memory(rank: int, n_ranks: int) -> None:
    def see(fsdp: Any) -> Any:
        model = sharded(fsdp)
        backward(model, data(rank))
        found = [weakref.ref(p) for p in model.parameters()]
        found += [weakref.ref(model), weakref.ref(model._get_fsdp_state())]
        del model
        gc.collect()
        return [ref() is None for ref in found]

    assert all(agree(see))


@on_ranks(2)
def test_i39_i41_i46_the_root(rank: int, n_ranks: int) -> None:
    def see(fsdp: Any) -> Any:
        model = sharded(fsdp)
        block = model.blocks[0]
        block(data(rank))  # the first to run becomes root
        text = "already been lazily initialized"
        seen: list[Any] = [block._get_fsdp_state()._is_root]
        seen.append(raised(lambda: model(data(rank)), text, "FSDP"))
        model = sharded(fsdp)
        parameters = shards(model)
        model(data(rank))
        states = [m._get_fsdp_state() for m in model.modules() if isinstance(m, fsdp.FSDPModule)]
        seen += [state._is_root for state in states]
        assert len({id(state._state_ctx) for state in states}) == 1
        assert len({id(state._comm_ctx) for state in states}) == 1
        backward(model.blocks[1], data(rank))  # alone, after the root has been found
        seen.append(gradients(parameters))
        model._get_fsdp_state()._lazy_init()
        backward(model, data(rank))
        return seen, gradients(parameters)

    seen, _ = agree(see)
    assert seen[:4] == [True, "RuntimeError", True, False]


@on_ranks(1)
def test_i40_lists_cannot_be_roots(rank: int, n_ranks: int) -> None:
    def see(fsdp: Any) -> Any:
        pair = [nn.Linear(4, 4), nn.Linear(4, 4)]
        fsdp.fully_shard(pair)
        return raised(lambda: pair[0](torch.ones(1, 4)), "requires a single root module")

    assert agree(see) == "RuntimeError"


@on_ranks(2)
def test_i42_i43_lazy_init(rank: int, n_ranks: int) -> None:
    """Names from the root on, the order of states, and what is read only now."""

    def see(fsdp: Any) -> Any:
        net = nn.Sequential(Twice(), Block(4, 3), Block(4, 3), nn.Linear(4, 4))
        fsdp.fully_shard([net[1].norm, net[1].up])
        fsdp.fully_shard(net[0])
        fsdp.fully_shard([net[2], net[3]])
        model = fsdp.fully_shard(net)
        group = model._get_fsdp_state()._fsdp_param_group
        early = [group._module_fqn, [p._param_fqn for p in group.fsdp_params]]
        model(torch.ones(2, 4))
        states = model._get_fsdp_state()._state_ctx.all_states
        groups = [g for state in states for g in state._fsdp_param_groups]
        names = [(g._module_fqn, [p._param_fqn for p in g.fsdp_params]) for g in groups]
        return early, names, [state._auto_reshard_after_forward for state in states]

    _, names, _ = agree(see)
    assert [name for name, _ in names] == ["", "0", "1.norm, 1.up", "2, 3"]


@on_ranks(2)
def test_i15_i22_replicated_placements(rank: int, n_ranks: int) -> None:
    def see(fsdp: Any) -> Any:
        model = linear(fsdp, mesh=cached_mesh((2, 1), ("replicate", "shard")))
        return isinstance(model.weight.placements[0], Replicate), str(model.weight.placements)

    assert agree(see)[0]

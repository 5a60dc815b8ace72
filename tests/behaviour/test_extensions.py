"""EX: all-gather extensions, which are methods of a shard that replace what is gathered."""

import contextlib
import math
import os
import weakref
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from harness import cached_mesh, implementation, seed_everything
from models import Block, data
from parity import Pair, Side, Tolerance, on_ranks
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint

from behaviour.records import collectives

WIDTH = 6
# Rows: 8 for 2 ranks alike, 7 leaves the second rank a padded row.
EVEN, UNEVEN = 8, 7


class Extension:
    """Gathers a parameter through the two methods and keeps what they were given."""

    def __init__(self, inner: Tensor, *, alias: bool = True, pad_with: float = 0.0) -> None:
        self.inner = inner
        self.alias = alias
        self.pad_with = pad_with
        self.pre: list[tuple[Any, ...]] = []
        self.post: list[tuple[Any, ...]] = []
        self.grad_modes: list[tuple[str, bool]] = []
        self.fails = False
        self.result: Tensor | None = None

    def attach(self) -> "Extension":
        self.inner.fsdp_pre_all_gather = self.fsdp_pre_all_gather
        self.inner.fsdp_post_all_gather = self.fsdp_post_all_gather
        return self

    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
        # A module that hangs on its own shard is never collected: the core's reference is unseen.
        owner = weakref.ref(module)
        self.pre.append((mesh, outer_size, outer_stride, owner, mp_policy))
        self.grad_modes.append(("pre", torch.is_grad_enabled()))
        rows = math.ceil(outer_size[0] / mesh.size())
        padded = self.inner.new_full((rows, *outer_size[1:]), self.pad_with)
        with torch.no_grad():
            padded[: self.inner.size(0)] = self.inner
        return (padded,), "metadata"

    def fsdp_post_all_gather(self, outputs, metadata, param_dtype, *, out=None):
        self.post.append((outputs, metadata, param_dtype, out))
        self.grad_modes.append(("post", torch.is_grad_enabled()))
        if self.fails:
            raise RuntimeError("post failed")
        (gathered,) = outputs
        if out is not None:
            with torch.no_grad():
                if not self.alias:
                    out.copy_(gathered[: out.size(0)])
            return None
        self.result = gathered if self.alias else gathered.to(param_dtype, copy=True)
        return self.result, () if self.alias else (self.result,)


class Line(nn.Module):
    def __init__(self, rows: int = EVEN) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, rows)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


def extended(rows: int = EVEN, fsdp_options: dict[str, Any] | None = None, **options: Any) -> Pair:
    """A pair of Lines whose weight has an extension, `side.model.extension`."""

    def shard(model: nn.Module, fsdp: Any) -> None:
        fsdp.fully_shard(model, **(fsdp_options or {"reshard_after_forward": True}))
        model.extension = Extension(model.linear.weight._local_tensor, **options).attach()

    return Pair(lambda: Line(rows), shard)


def line_data(rank: int, step: int = 0) -> Tensor:
    return data(rank, step, 4, WIDTH)


@on_ranks(2)
def test_ex1_found_on_the_inner_tensor_at_every_gather(rank: int, n_ranks: int) -> None:
    pair = extended()
    pair.step(line_data(rank))
    first = [side.model.extension for side in (pair.theirs, pair.ours)]
    assert [len(extension.pre) for extension in first] == [2, 2]

    def replace(side: Side) -> None:
        side.model.extension = Extension(side.model.linear.weight._local_tensor).attach()

    pair.do(replace)
    pair.step(line_data(rank, 1))
    for side, old in zip((pair.theirs, pair.ours), first, strict=True):
        assert len(old.pre) == len(old.post) == 2
        assert len(side.model.extension.pre) == len(side.model.extension.post) == 2


@on_ranks(2)
def test_ex1_not_looked_for_on_the_parameter(rank: int, n_ranks: int) -> None:
    def shard(model: nn.Module, fsdp: Any) -> None:
        fsdp.fully_shard(model)
        model.extension = extension = Extension(model.linear.weight._local_tensor)
        model.linear.weight.fsdp_pre_all_gather = extension.fsdp_pre_all_gather
        model.linear.weight.fsdp_post_all_gather = extension.fsdp_post_all_gather

    pair = Pair(Line, shard)
    pair.step(line_data(rank))
    assert pair.theirs.model.extension.pre == pair.ours.model.extension.pre == []


@on_ranks(2)
def test_ex1_both_methods_or_none(rank: int, n_ranks: int) -> None:
    def late(side: Side) -> str:
        inner = side.model.linear.weight._local_tensor
        inner.fsdp_pre_all_gather = Extension(inner).fsdp_pre_all_gather
        with pytest.raises(AssertionError, match="Both fsdp_pre_all_gather and fsdp_post_all_gath"):
            side.model(line_data(rank))
        return type(inner).__name__

    Pair(Line, lambda model, fsdp: fsdp.fully_shard(model)).both(late)

    def early(side: Side) -> None:
        model = Line()
        model.linear.weight = nn.Parameter(OnlyPre.of(model.linear.weight.detach()))
        with pytest.raises(AssertionError, match="Both fsdp_pre_all_gather and fsdp_post_all_gath"):
            side.fsdp.fully_shard(model)

    Pair(Line, lambda model, fsdp: fsdp.fully_shard(model)).do(early)


class Wrapped(torch.Tensor):
    """A tensor around another; its operators run on the inner one and are recorded by name."""

    seen: list[str] = []

    @staticmethod
    def __new__(cls, inner: Tensor) -> "Wrapped":
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), dtype=inner.dtype, device=inner.device
        )

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    @classmethod
    def of(cls, tensor: Tensor) -> "Wrapped":
        return cls(tensor.clone())

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.inner})"

    def __tensor_flatten__(self):
        return ["inner"], None

    @classmethod
    def __tensor_unflatten__(cls, tensors, _, outer_size, outer_stride):
        return cls(tensors["inner"])

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        Wrapped.seen.append(function.overloadpacket.__name__)
        args, kwargs = torch.utils._pytree.tree_map_only(Wrapped, take_inner, (args, kwargs or {}))
        result = function(*args, **kwargs)
        if function is torch.ops.aten.copy_.default:
            return None
        return torch.utils._pytree.tree_map_only(Tensor, cls, result)


def take_inner(wrapped: Wrapped) -> Tensor:
    return wrapped.inner


class OnlyPre(Wrapped):
    def fsdp_pre_all_gather(self, mesh):
        return (self.inner,), None


class Halved(Wrapped):
    """Travels in bfloat16 and comes out in float32."""

    calls: list[str] = []

    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
        Halved.calls.append("pre")
        rows = math.ceil(outer_size[0] / mesh.size())
        padded = self.inner.new_zeros((rows, *outer_size[1:]), dtype=torch.bfloat16)
        padded[: self.inner.size(0)] = self.inner
        return (padded,), None

    def fsdp_post_all_gather(self, outputs, metadata, param_dtype, *, out=None):
        Halved.calls.append("post")
        (gathered,) = outputs
        if out is None:
            result = gathered.to(param_dtype)
            return result, (gathered, result)
        with torch.no_grad():
            out.copy_(gathered[: out.size(0)])
        return None


def halved_line(rows: int = EVEN, device: str | None = None) -> nn.Module:
    model = Line(rows).to(device) if device else Line(rows)
    model.linear.weight = nn.Parameter(Halved.of(model.linear.weight.detach()))
    return model


def plain(tensor: Tensor) -> Tensor:
    return tensor.inner if isinstance(tensor, Wrapped) else tensor


@pytest.mark.parametrize("rows", [EVEN, UNEVEN])
@on_ranks(2)
def test_ex2_methods_of_a_subclass_from_meta(rank: int, n_ranks: int, rows: int) -> None:
    """Built on meta, materialised, filled and trained: the same losses, gradients and shards."""
    results = []
    for side in sides():
        torch.manual_seed(3)
        with torch.device("meta"):
            model = Line(rows)
        model.linear.weight = nn.Parameter(Halved(model.linear.weight.detach()))
        side.fully_shard(model)
        model.to_empty(device="cpu")
        with torch.no_grad():
            plain(model.linear.weight._local_tensor).fill_(0.25 + rank)
            model.linear.bias._local_tensor.fill_(0.5)
        optimizer = torch.optim.SGD([model.linear.bias], lr=0.1)
        Halved.calls.clear()
        losses = []
        for step in range(2):
            loss = model(line_data(rank, step)).square().mean()
            loss.backward()
            losses.append(loss.item())
            grad = model.linear.weight.grad.to_local().clone()
            optimizer.step()
            optimizer.zero_grad()
        assert Halved.calls == ["pre", "post"] * 2  # a root keeps its parameters for backward
        results.append((losses, grad.tolist()))
        assert type(model.linear.weight._local_tensor) is Halved
    assert results[0] == results[1]
    assert results[0][0][0] != results[0][0][1]


def sides() -> tuple[Any, Any]:
    import harness
    import torch.distributed.fsdp as torch_fsdp

    return torch_fsdp, harness.implementation()


@on_ranks(2)
def test_ex2_attached_after_to_empty_and_kept_through_training(rank: int, n_ranks: int) -> None:
    pair = extended()

    def inner_is_kept(side: Side) -> bool:
        before = side.model.extension.inner
        assert side.shards["linear.weight"]._local_tensor is before
        side.optimizer.step()
        state = {name: value.detach().clone() for name, value in side.model.state_dict().items()}
        side.model.load_state_dict(state)
        return side.model.linear.weight._local_tensor is before

    for step in range(2):
        pair.forward(line_data(rank, step))
        pair.backward()
        assert pair.both(inner_is_kept) is True


@pytest.mark.parametrize("mesh", ["1d", "hsdp"])
@on_ranks(2)
def test_ex4_pre_gets_mesh_size_module_and_policy(rank: int, n_ranks: int, mesh: str) -> None:
    device_mesh = cached_mesh((2,)) if mesh == "1d" else cached_mesh((1, 2), ("replica", "shard"))
    policy = MixedPrecisionPolicy(output_dtype=torch.float32)
    pair = extended(UNEVEN, {"mesh": device_mesh, "mp_policy": policy})

    def given(side: Side) -> Any:
        side.model(line_data(rank))
        mesh, size, stride, module, mp_policy = side.model.extension.pre[0]
        assert module() is side.model.linear
        assert mp_policy == policy
        return mesh.ndim, mesh.size(), tuple(size), tuple(stride)

    assert pair.both(given) == (1, 2, (UNEVEN, WIDTH), (WIDTH, 1))


@on_ranks(2)
def test_ex4_one_or_five_arguments(rank: int, n_ranks: int) -> None:
    """One is the mesh alone; a starred argument counts as one; all other counts are refused."""

    def replace_pre(side: Side, pre: Any) -> None:
        side.model.extension.inner.fsdp_pre_all_gather = pre

    pair = extended()
    inner = {side.name: side.model.extension.inner for side in (pair.theirs, pair.ours)}
    pair.do(lambda side: replace_pre(side, lambda mesh: ((inner[side.name],), None)))
    pair.step(line_data(rank))
    pair.do(lambda side: replace_pre(side, lambda *args: ((inner[side.name],), None)))
    pair.step(line_data(rank, 1))

    def refused(side: Side) -> None:
        replace_pre(side, lambda mesh, size: ((inner[side.name],), None))
        with pytest.raises(AssertionError, match="Invalid fsdp_pre_all_gather"):
            side.model(line_data(rank))

    pair.do(refused)


@on_ranks(2, 3)
def test_ex7_padding_is_never_read(rank: int, n_ranks: int) -> None:
    pair = extended(UNEVEN, pad_with=math.nan)
    for step in range(2):
        pair.step(line_data(rank, step))
    rows = math.ceil(UNEVEN / n_ranks)

    def gathered(side: Side) -> list[int]:
        (outputs, *_), *_ = side.model.extension.post
        return list(outputs[0].shape)

    assert pair.both(gathered) == [n_ranks * rows, WIDTH]
    assert not pair.both(lambda side: side.model(line_data(rank))).isnan().any()


@pytest.mark.parametrize("is_mixed", [False, True])
@on_ranks(2)
def test_ex8_one_gather_for_all_inputs(rank: int, n_ranks: int, is_mixed: bool) -> None:
    """In bytes if the dtypes differ; the policy's dtype reaches the plain parameters only."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if is_mixed else None)
    options = {"mp_policy": policy, "reshard_after_forward": True}
    pair = extended(EVEN, options, alias=not is_mixed)

    def gathers(side: Side) -> list[tuple[str, str, int]]:
        with collectives() as seen:
            side.model(line_data(rank))
        (outputs, _, param_dtype, _), *_ = side.model.extension.post
        assert outputs[0].dtype is torch.float32
        assert param_dtype is (torch.bfloat16 if is_mixed else torch.float32)
        assert side.model.extension.pre[0][-1].param_dtype is policy.param_dtype
        return [(name, str(dtype), size) for name, dtype, size in seen]

    dtype = "torch.uint8" if is_mixed else "torch.float32"
    assert pair.both(gathers) == [("AG", dtype, n_ranks)]


@on_ranks(2)
def test_ex9_post_receives_rank_major_outputs(rank: int, n_ranks: int) -> None:
    pair = extended(EVEN, {"reshard_after_forward": False})

    def with_amax(side: Side) -> Any:
        extension = side.model.extension

        def pre(mesh, size, stride, module, policy):
            scalar = torch.tensor(10 + rank, dtype=torch.int64)
            codes = torch.full((3, 2), rank, dtype=torch.int8)
            return [extension.inner, scalar, codes], {"rank": rank}

        def post(outputs, metadata, param_dtype, *, out=None):
            extension.post.append((outputs, metadata, param_dtype, out))
            return (outputs[0], outputs) if out is None else None

        extension.inner.fsdp_pre_all_gather = pre
        extension.inner.fsdp_post_all_gather = post
        side.model(line_data(rank))
        (outputs, metadata, param_dtype, out), *_ = extension.post
        assert out is None and param_dtype is torch.float32
        return [output.tolist() for output in outputs[1:]], metadata["rank"], outputs[0].shape

    scalars_and_codes, metadata, shape = pair.both(with_amax)
    assert scalars_and_codes == [[10, 11], [[0, 0]] * 3 + [[1, 1]] * 3]
    assert metadata == rank
    assert shape == (EVEN, WIDTH)
    pair.step(line_data(rank))


@on_ranks(2)
def test_ex10_outputs_and_inner_tensors_are_freed_at_reshard(rank: int, n_ranks: int) -> None:
    pair = extended(alias=False)

    def freed(side: Side) -> list[int]:
        side.model(line_data(rank))
        extension = side.model.extension
        (outputs, *_), *_ = extension.post
        bytes_kept = [t.untyped_storage().nbytes() for t in (outputs[0], extension.result)]
        side.model.unshard()
        bytes_again = [t.untyped_storage().nbytes() for t in (outputs[0], extension.result)]
        side.model.reshard()
        return bytes_kept + bytes_again

    full_bytes = EVEN * WIDTH * 4
    assert pair.both(freed) == [0, 0, full_bytes, full_bytes]


@on_ranks(2)
def test_ex10_other_tensors_stay_allocated(rank: int, n_ranks: int) -> None:
    pair = extended(alias=False)

    def kept(side: Side) -> int:
        extension = side.model.extension
        inner = extension.fsdp_post_all_gather

        def post(*args, **kwargs):
            result = inner(*args, **kwargs)
            return None if result is None else (result[0], ())

        extension.inner.fsdp_post_all_gather = post
        side.model(line_data(rank))
        return extension.result.untyped_storage().nbytes()

    assert pair.both(kept) == EVEN * WIDTH * 4


@on_ranks(2)
def test_ex11_later_calls_refill_the_parameter(rank: int, n_ranks: int) -> None:
    """`out` is the parameter itself; its version stays, and what the call returns is ignored."""
    pair = extended()

    def refilled(side: Side) -> Any:
        extension = side.model.extension
        versions, pointers, storages = [], [], []
        for _ in range(3):
            side.model.unshard()
            weight = side.model.linear.weight
            versions.append(weight._version)
            outputs, _, _, out = extension.post[-1]
            assert out is None or out is weight
            pointers.append(weight.data_ptr() == outputs[0].data_ptr())
            storages.append(outputs[0].untyped_storage()._cdata)
            side.model.reshard()
        assert [call[-1] is None for call in extension.post] == [True, False, False]
        assert len(set(storages)) == 1
        return versions, pointers

    versions, pointers = pair.both(refilled)
    assert len(set(versions)) == 1
    assert pointers == [True] * 3


@on_ranks(2)
def test_ex18_offloaded_shards(rank: int, n_ranks: int) -> None:
    policy = CPUOffloadPolicy(pin_memory=False)
    pair = extended(UNEVEN, {"offload_policy": policy, "reshard_after_forward": True})
    for step in range(2):
        pair.step(line_data(rank, step))
    assert len(pair.ours.model.extension.pre) == len(pair.theirs.model.extension.pre) == 4


@on_ranks(2)
def test_ex19_gradients_are_plain_and_in_the_original_dtype(rank: int, n_ranks: int) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    options = {"mp_policy": policy, "reshard_after_forward": True}
    pair = extended(UNEVEN, options, alias=False)
    pair.tolerance = Tolerance.of(n_ranks, torch.bfloat16)
    pair.forward(line_data(rank))
    assert pair.ours.model.extension.result.dtype is torch.bfloat16
    pair.backward()
    grad = pair.ours.model.linear.weight.grad
    assert isinstance(grad, DTensor)
    assert type(grad._local_tensor) is Tensor
    assert grad.dtype is torch.float32


@on_ranks(2)
def test_ex19_frozen_parameters_are_gathered(rank: int, n_ranks: int) -> None:
    pair = extended()
    pair.do(lambda side: side.model.linear.weight.requires_grad_(False))
    pair.forward(line_data(rank))
    pair.backward()
    assert pair.ours.model.linear.weight.grad is None
    assert pair.ours.model.linear.bias.grad is not None
    assert len(pair.ours.model.extension.post) == len(pair.theirs.model.extension.post) == 2


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x, use_reentrant=False)


@on_ranks(2)
def test_ex20_one_pair_of_calls_per_gather(rank: int, n_ranks: int) -> None:
    def shard(model: nn.Module, fsdp: Any) -> None:
        fsdp.fully_shard(model.block)
        fsdp.fully_shard(model)
        model.extension = Extension(model.block.up.weight._local_tensor).attach()

    pair = Pair(Checkpointed, shard)

    def n_calls(side: Side) -> list[str]:
        calls = [name for name, _ in side.model.extension.grad_modes]
        side.model.extension.grad_modes.clear()
        return calls

    pair.forward(data(rank))
    assert pair.both(n_calls) == ["pre", "post"]
    pair.backward()
    assert pair.both(n_calls) == ["pre", "post"]
    pair.do(lambda side: side.model.block.unshard())
    assert pair.both(n_calls) == ["pre", "post"]


class Partly(nn.Module):
    """Runs one layer, or both."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Line(WIDTH), Line(WIDTH)

    def forward(self, x: Tensor, is_whole: bool) -> Tensor:
        x = self.first(x)
        return self.second(x) if is_whole else x


@on_ranks(2)
def test_ex20_a_unit_that_comes_late_is_asked_anew(rank: int, n_ranks: int) -> None:
    """What its method gave at set-up is of weights that have changed since."""

    def shard(model: nn.Module, fsdp: Any) -> None:
        fsdp.fully_shard(model.second)
        fsdp.fully_shard(model)
        model.extension = Extension(model.second.linear.weight._local_tensor).attach()

    pair = Pair(Partly, shard)
    pair.both(lambda side: side.model(line_data(rank), False))
    dist.barrier()  # the other rank has compared its unsharded parameters

    def load(side: Side) -> None:
        state = {name: value.detach() * 1.5 for name, value in side.model.state_dict().items()}
        side.model.load_state_dict(state)

    pair.do(load)
    pair.both(lambda side: side.model(line_data(rank), True))


@on_ranks(2)
def test_ex21_what_a_subclass_has_to_implement(rank: int, n_ranks: int) -> None:
    """The operators that a parameter of a tensor subclass sees at set-up, in forward and saving."""
    results = []
    for side in sides():
        Wrapped.seen.clear()
        model = halved_line(UNEVEN)
        side.fully_shard(model)
        at_init = set(Wrapped.seen)
        Wrapped.seen.clear()
        model(line_data(rank)).sum().backward()
        at_training = set(Wrapped.seen)
        Wrapped.seen.clear()
        state = model.state_dict()
        assert type(state["linear.weight"]._local_tensor) is Halved
        results.append((at_init, at_training, set(Wrapped.seen)))
    assert results[1] == results[0]
    at_init, at_training, at_saving = results[0]
    assert at_init >= {"split", "new_zeros", "slice", "copy_", "view", "detach"}
    assert "view" in at_training
    assert at_saving <= {"detach", "view", "alias"}


@on_ranks(1, 2)
def test_ex23_beside_plain_parameters(rank: int, n_ranks: int) -> None:
    """A block with one extended parameter among plain ones trains as torch's."""
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)

    def shard(model: nn.Module, fsdp: Any) -> None:
        fsdp.fully_shard(model, mp_policy=policy)
        model.extension = Extension(model.up.weight._local_tensor).attach()

    pair = Pair(Block, shard)
    for step in range(3):
        pair.step(data(rank, step))
    pair.eval_forward(data(rank, 3))


@on_ranks(2)
def test_ex13_a_failed_post_is_called_again(rank: int, n_ranks: int) -> None:
    pair = extended()

    def fail(side: Side) -> None:
        side.model.extension.fails = True
        with contextlib.suppress(AssertionError), pytest.raises(RuntimeError, match="post failed"):
            side.model(line_data(rank))
        side.model.extension.fails = False

    pair.do(fail)
    pair.step(line_data(rank))

    def n_calls(side: Side) -> list[str]:
        return [name for name, _ in side.model.extension.grad_modes]

    # The gather of the failed call is still there: it is not asked for again.
    assert pair.both(n_calls) == ["pre", "post", "post", "pre", "post"]


@on_ranks(2)
def test_ex13_the_users_code_records_no_history(rank: int, n_ranks: int) -> None:
    """Torch calls the second method with gradients enabled in a training forward."""
    pair = extended()
    pair.step(line_data(rank))
    theirs, ours = (side.model.extension.grad_modes for side in (pair.theirs, pair.ours))
    assert ("post", True) in theirs
    assert ours == [("pre", False), ("post", False)] * 2


class Careless(Extension):
    """Copies all of what was gathered, padding too."""

    def fsdp_post_all_gather(self, outputs, metadata, param_dtype, *, out=None):
        if out is None:
            return outputs[0].clone(), ()
        return out.copy_(outputs[0])


@on_ranks(2)
def test_ex12_padded_rows_in_the_second_gather(rank: int, n_ranks: int) -> None:
    """The error is torch's; ours says whose rows they are and what to do."""

    def see(fsdp: Any) -> str:
        model = fsdp.fully_shard(Line(UNEVEN))
        Careless(model.linear.weight._local_tensor).attach()
        model(line_data(rank))
        model.reshard()
        with torch.no_grad(), pytest.raises(RuntimeError, match="must match the size") as caught:
            model(line_data(rank))
        return str(caught.value)

    text = see(torch.distributed.fsdp)
    ours = see(implementation())
    assert text.splitlines()[0] in ours
    assert "'linear.weight'" in ours and "narrow" in ours


@on_ranks(2)
def test_ex5_what_the_first_method_may_return(rank: int, n_ranks: int) -> None:
    """Torch fails later and elsewhere: with no tensors, a bare one, one that is not contiguous."""

    def see(fsdp: Any, pre: Any) -> str:
        model = fsdp.fully_shard(Line())
        extension = Extension(model.linear.weight._local_tensor).attach()
        extension.inner.fsdp_pre_all_gather = lambda mesh: pre(extension.inner)
        try:
            model(line_data(rank)).sum().backward()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "works"

    who = "fsdp_pre_all_gather of parameter 'linear.weight' returned"
    for pre, ours in (
        (lambda inner: inner, f"TypeError: {who} a Tensor"),
        (lambda inner: (inner, None), f"TypeError: {who} a Tensor as inputs"),
        (lambda inner: ((), None), f"ValueError: {who} no inputs"),
        (lambda inner: ((inner.t().contiguous().t(),), None), "works"),
    ):
        assert see(torch.distributed.fsdp, pre) != "works"
        assert see(implementation(), pre).startswith(ours)
    assert see(implementation(), lambda inner: ([inner.clone()], None)) == "works"
    with mock.patch.dict(os.environ, FSDP_C_STRICT="1"):
        strict = see(implementation(), pre)
    if implementation() is not torch.distributed.fsdp:
        assert strict.startswith(f"RuntimeError: {who} a tensor that is not contiguous")


@on_ranks(2)
def test_ex6_inputs_that_differ_over_ranks(rank: int, n_ranks: int) -> None:
    """Torch hangs, or fails on the ranks with padding alone: all say so."""

    def fails(pre: Any, *texts: str) -> None:
        model = implementation().fully_shard(Line(UNEVEN))
        inner = model.linear.weight._local_tensor
        Extension(inner).attach()
        inner.fsdp_pre_all_gather = pre(inner)
        with pytest.raises((RuntimeError, AssertionError)) as caught:
            model(line_data(rank))
        assert all(text in str(caught.value) for text in ("'linear.weight'", *texts))

    for strict in "01":  # that all ranks raise stays
        with mock.patch.dict(os.environ, FSDP_C_STRICT=strict):
            fails(lambda inner: lambda mesh: ((inner,), None), "on every rank", "[[[3, 6]")
    fails(lambda inner: lambda mesh: ((inner.new_ones(4, 6).to(DTYPES[rank]),), None), "float64")
    fails(lambda inner: lambda mesh, size, stride, module, policy: ((inner,), None), "padded")


DTYPES = (torch.float32, torch.float64)


@on_ranks(2)
def test_ex17_another_dim_needs_inputs_of_the_shards_size(rank: int, n_ranks: int) -> None:
    def see(fsdp: Any, change: Any) -> Any:
        seed_everything(1)
        model = Line()
        fsdp.fully_shard(model, shard_placement_fn=lambda p: Shard(p.dim() - 1))
        weight = model.linear.weight
        extension = Extension(weight._local_tensor).attach()
        extension.inner.fsdp_pre_all_gather = lambda mesh: ((change(extension.inner),), None)
        x = line_data(rank)
        model(x).sum().backward()
        return weight.grad.to_local()

    both = (torch.distributed.fsdp, implementation())
    theirs, ours = (see(fsdp, lambda inner: inner.clone()) for fsdp in both)
    assert torch.equal(ours, theirs)
    with pytest.raises(RuntimeError):
        see(torch.distributed.fsdp, lambda inner: inner.repeat(2, 1))
    with pytest.raises(ValueError, match="'linear.weight'.*sharded on dim 1"):
        see(implementation(), lambda inner: inner.repeat(2, 1))

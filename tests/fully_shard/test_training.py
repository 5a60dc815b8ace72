"""Training beside torch: several forwards or backwards, none, and unsharding by hand."""

import collections
import dataclasses
import warnings
from typing import Any

import harness
import models
import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from models import WIDTH, Block, Branches, Net, data
from parity import Pair, Side, Tolerance, compare, local, on_ranks, total
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

import fsdp_c


def shard_blocks(**options):
    return lambda model, fsdp: models.shard_blocks(model, fsdp, **options)


@pytest.mark.parametrize("reshard", [True, False, None])
@on_ranks(1, 2)
def test_forwards_without_backward(rank: int, n_ranks: int, reshard: bool | None) -> None:
    pair = Pair(Net, shard_blocks(reshard_after_forward=reshard))
    for step in range(3):
        pair.eval_forward(data(rank, 10 * step))
        pair.step(data(rank, step))
        pair.eval_forward(data(rank, 10 * step + 1))
        pair.eval_forward(data(rank, 10 * step + 2))
        # Its output is dropped with the graph.
        pair.forward(data(rank, 10 * step + 3))


@on_ranks(1, 2)
def test_eval_mode_with_grad(rank: int, n_ranks: int) -> None:
    pair = Pair(lambda: Dropping(), models.shard_root)
    pair.step(data(rank))
    pair.do(lambda side: side.model.eval(), "eval")
    pair.step(data(rank, 1))
    pair.do(lambda side: side.model.train(), "train")
    pair.step(data(rank, 2))


class Dropping(nn.Module):
    """Dropout and a batch norm: both differ between train and eval, and one has buffers that
    change.
    """

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.norm(self.block(x)))


@on_ranks(1, 2)
def test_inference_mode(rank: int, n_ranks: int) -> None:
    pair = Pair(Net, models.shard_blocks)
    pair.step(data(rank))

    def infer(side: Side) -> Tensor:
        with torch.inference_mode():
            return side.model(data(rank, 1)).clone()

    pair.both(infer)
    pair.step(data(rank, 2))


@on_ranks(1, 2)
def test_first_forward_in_inference_mode(rank: int, n_ranks: int) -> None:
    """Torch cannot train after that; the gradients must be those of a model that never did it."""
    pair = Pair(Net, models.shard_blocks)
    pair.skip_if_same()
    with torch.inference_mode():
        pair.ours.model(data(rank))
    # Reshards the root, which keeps its parameters after a forward.
    pair.ours.model.reshard()
    pair.step(data(rank, 1))


@on_ranks(1, 2, 3)
def test_two_forwards_then_backward(rank: int, n_ranks: int) -> None:
    pair = Pair(Net, models.shard_blocks)
    for step in range(2):
        pair.both(lambda side: keep_all(side, [data(rank, step), data(rank, 5 + step)]))
        pair.backward()
        pair.optimize()


def keep_all(side: Side, inputs: list[Tensor]) -> list[Tensor]:
    side.kept = [side.model(x) for x in inputs]
    return side.kept


@on_ranks(1, 2)
def test_two_forwards_then_two_backwards(rank: int, n_ranks: int) -> None:
    pair = Pair(Net, models.shard_blocks)
    for step in range(2):
        pair.both(lambda side: keep_all(side, [data(rank, step), data(rank, 5 + step)]))
        pair.both(lambda side: total(side.kept[1]).backward(), "second's backward")
        pair.both(lambda side: total(side.kept[0]).backward(), "first's backward")
        pair.optimize()


@pytest.mark.parametrize("reshard", [True, False])
@on_ranks(1, 2)
def test_retain_graph(rank: int, n_ranks: int, reshard: bool) -> None:
    pair = Pair(Net, shard_blocks(reshard_after_forward=reshard))
    for step in range(2):
        pair.forward(data(rank, step))
        pair.backward(retain_graph=True)
        pair.backward()
        pair.optimize()


@on_ranks(1, 2)
def test_input_gradients(rank: int, n_ranks: int) -> None:
    pair = Pair(Net, models.shard_blocks)

    def step(side: Side) -> Tensor:
        x = data(rank).requires_grad_()
        total(side.model(x)).backward()
        return x.grad

    pair.both(step)
    pair.optimize()


@on_ranks(1, 2)
def test_unshard_after_its_own_backward(rank: int, n_ranks: int) -> None:
    """The end of a backward passes over units that are through, but not if one came back."""
    pair = Pair(Net, models.shard_blocks)
    pair.skip_if_same()
    model = pair.ours.model
    unit = model.blocks[0]
    for step in range(2):
        x = data(rank, step).requires_grad_()
        x.register_hook(lambda grad: unit.unshard())
        total(model(x)).backward()
        assert all(isinstance(p, DTensor) for p in model.parameters())
    pair.do(lambda side: side.model.zero_grad(), "zero_grad")
    pair.step(data(rank, 2))


@on_ranks(1, 2)
def test_gradients_add_up_over_backwards(rank: int, n_ranks: int) -> None:
    """Without zero_grad, and then with zeroed gradients that stay the same objects."""
    pair = Pair(Net, models.shard_blocks)
    for step in range(2):
        pair.forward(data(rank, step))
        pair.backward()
    pair.optimize(set_to_none=False)
    before = {name: shard.grad for name, shard in pair.ours.shards.items()}
    pair.step(data(rank, 2), set_to_none=False)
    for name, shard in pair.ours.shards.items():
        assert shard.grad is before[name], name


@on_ranks(1, 2)
def test_kept_gradient_does_not_change(rank: int, n_ranks: int) -> None:
    pair = Pair(Net, models.shard_blocks)
    pair.forward(data(rank))
    pair.backward()
    kept = {name: shard.grad for name, shard in pair.ours.shards.items()}
    values = {name: grad.to_local().clone() for name, grad in kept.items()}
    pair.optimize()
    for step in range(1, 4):
        pair.step(data(rank, step))
    for name, grad in kept.items():
        assert torch.equal(grad.to_local(), values[name]), name


@pytest.mark.parametrize("async_op", [True, False])
@on_ranks(1, 2, 3)
def test_unshard_and_reshard(rank: int, n_ranks: int, async_op: bool) -> None:
    pair = Pair(Net, models.shard_blocks)

    def unshard(side: Side) -> bool:
        block = side.model.blocks[1]
        side.kept = block.unshard(async_op=async_op)
        assert isinstance(side.kept, side.fsdp.UnshardHandle) == async_op
        return isinstance(block.up.weight, DTensor)

    def wait(side: Side) -> Tensor:
        if side.kept is not None:
            side.kept.wait()
            side.kept.wait()
        return side.model.blocks[1].up.weight.detach().clone()

    # Before the first forward, and between steps.
    for step in range(2):
        pair.both(unshard)
        pair.both(wait)
        pair.both(lambda side: side.model.blocks[1].reshard(), "reshard")
        pair.both(unshard)
        pair.step(data(rank, step))


class Early(nn.Module):
    """Unshards its next block while the one before runs, as users overlap by hand."""

    def __init__(self, async_op: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.async_op = async_op

    def forward(self, x: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            if index + 1 < len(self.blocks):
                self.blocks[index + 1].unshard(async_op=self.async_op)
            x = block(x)
            block.reshard()
        return x


@pytest.mark.parametrize("async_op", [True, False])
@on_ranks(1, 2)
def test_unshard_inside_forward(rank: int, n_ranks: int, async_op: bool) -> None:
    pair = Pair(lambda: Early(async_op), models.shard_blocks)
    for step in range(3):
        pair.step(data(rank, step))


@pytest.mark.parametrize("first", [True, False])
@on_ranks(1, 2)
def test_reshard_setters(rank: int, n_ranks: int, first: bool) -> None:
    pair = Pair(Net, models.shard_blocks)
    pair.step(data(rank))
    pair.both(lambda side: side.model.set_reshard_after_forward(first), "after forward")
    pair.step(data(rank, 1))
    pair.both(lambda side: side.model.set_reshard_after_backward(False), "after backward")
    # The optimizer steps only once all is sharded again: torch would go on with stale weights.
    pair.forward(data(rank, 2))
    pair.backward()
    pair.forward(data(rank, 3))
    pair.backward()
    pair.do(lambda side: [unit.reshard() for unit in units(side)], "reshard all")
    pair.optimize()
    pair.both(lambda side: side.model.set_reshard_after_backward(True), "after backward again")
    pair.both(lambda side: side.model.set_reshard_after_forward(not first, recurse=False), "root")
    pair.step(data(rank, 4))


@on_ranks(1, 2)
def test_kept_units_keep_their_values(rank: int, n_ranks: int) -> None:
    """Writes to shards, the peers' included, show in the next forward and not before."""
    pair = Pair(Net, models.shard_blocks)
    pair.do(lambda side: side.model.set_reshard_after_backward(False), "after backward")
    pair.forward(data(rank))
    pair.backward()

    def write(side: Side) -> None:
        dist.barrier()
        for shard in side.shards.values():
            local(shard).add_(1)
        dist.barrier()

    pair.do(write)
    # Torch goes on with stale weights until it is told to reshard.
    pair.theirs.model.reshard()
    for block in pair.theirs.model.blocks:
        block.reshard()
    outputs = [side.model(data(rank, 1)) for side in (pair.theirs, pair.ours)]
    compare(outputs[1], outputs[0], pair.tolerance, "outputs")
    pair.do(lambda side: [unit.reshard() for unit in units(side)], "reshard all")
    pair.forward(data(rank, 1))
    pair.backward()

    def write_full(side: Side) -> None:
        with torch.no_grad():
            side.model.stem.weight.add_(1)

    pair.do(write_full)
    pair.forward(data(rank, 2))


def units(side: Side) -> list[nn.Module]:
    return [module for module in side.model.modules() if isinstance(module, side.fsdp.FSDPModule)]


@on_ranks(1, 2, 3, 6)
def test_shard_other_dim(rank: int, n_ranks: int) -> None:
    """Each matrix is split along its columns; widths divide, as torch asks."""

    def place(parameter: nn.Parameter) -> Shard | None:
        return Shard(1) if parameter.ndim == 2 else None

    pair = Pair(lambda: Net(hidden=12), shard_blocks(shard_placement_fn=place))
    for step in range(3):
        pair.step(data(rank, step))
    pair.check_state_dict()


@on_ranks(1, 2)
def test_shard_last_dim_of_three(rank: int, n_ranks: int) -> None:
    pair = Pair(
        lambda: nn.Conv1d(4, 6, 3),
        lambda model, fsdp: fsdp.fully_shard(
            model, shard_placement_fn=lambda p: Shard(1) if p.ndim == 3 else Shard(0)
        ),
    )
    for step in range(3):
        pair.step(data(rank, step, 2, 4, 8))


@on_ranks(1, 2, 3)
def test_unused_parameters(rank: int, n_ranks: int) -> None:
    """A gradient that no rank has stays None, or keeps what it was."""
    pair = Pair(lambda: Branches(2), models.shard_root)
    pair.step(data(rank), use=(0,))
    pair.step(data(rank, 1), use=(0, 1), set_to_none=False)
    pair.step(data(rank, 2), use=(1,), set_to_none=False)
    pair.step(data(rank, 3), use=())


@on_ranks(1, 2)
def test_unused_outputs(rank: int, n_ranks: int) -> None:
    pair = Pair(Net, models.shard_blocks)

    def step(side: Side) -> Tensor:
        first = side.model.blocks[0](data(rank))
        side.model.blocks[1](first)
        loss = total(side.model.blocks[2](first))
        loss.backward()
        return loss.detach()

    pair.step(data(rank))
    pair.both(step)
    pair.optimize()
    pair.step(data(rank, 1))


@on_ranks(1, 2, 3)
def test_group_partly_run(rank: int, n_ranks: int) -> None:
    pair = Pair(Branches, models.shard_grouped)
    for step, use in enumerate([(0, 1, 2), (0, 2), (2, 0), (0, 1), (1, 0, 2)]):
        pair.step(data(rank, step), use=use)


@pytest.mark.parametrize("before", [True, False])
@on_ranks(1, 2)
def test_ignored_parameters(rank: int, n_ranks: int, before: bool) -> None:
    def shard(model: Net, fsdp) -> None:
        ignored = {model.scale, *model.blocks[0].norm.parameters()}
        for block in model.blocks:
            fsdp.fully_shard(block, ignored_params=ignored)
        fsdp.fully_shard(model, ignored_params=ignored)
        assert model.scale in ignored

    pair = Pair(Net, shard)
    for step in range(2):
        pair.step(data(rank, step), set_to_none=before)


class Methods(nn.Module):
    """Work outside forward, once a plain method and once with a nested unit."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.stem = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks[1](self.blocks[0](self.stem(x)))

    def encode(self, x: Tensor, *, times: int = 1) -> Tensor:
        for _ in range(times):
            x = self.blocks[0](self.stem(x))
        return x


@on_ranks(1, 2)
def test_registered_forward_method(rank: int, n_ranks: int) -> None:
    def shard(model: Methods, fsdp) -> None:
        models.shard_blocks(model, fsdp)
        fsdp.register_fsdp_forward_method(model, "encode")
        with pytest.raises(ValueError):
            fsdp.register_fsdp_forward_method(model, "no_such_method")
        fsdp.register_fsdp_forward_method(nn.Linear(2, 2), "anything")

    pair = Pair(Methods, shard)

    def encode(side: Side) -> Tensor:
        side.kept = side.model.encode(data(rank), times=2)
        return side.kept

    for step in range(2):
        pair.both(encode)
        pair.backward()
        pair.optimize()
        pair.step(data(rank, step))


@dataclasses.dataclass
class Result:
    value: Any
    note: Any = None


class Detached(nn.Module):
    """What it returns needs no backward; `hide` says where it is."""

    def __init__(self, hide: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.hide = hide

    def forward(self, x: Tensor) -> Any:
        return self.hide(self.layer(x).detach())


@on_ranks(2)
def test_outputs_without_gradients(rank: int, n_ranks: int) -> None:
    """In what torch opens too, they hide no tensor: no warning, and the unit is resharded."""
    shown = (
        Result,
        lambda x: Result([x, 1.0], Result({"x": x})),
        lambda x: collections.OrderedDict(x=Result((x,))),
    )
    for hide in shown:
        for fsdp in (torch_fsdp, fsdp_c):
            model = fsdp.fully_shard(Detached(hide), reshard_after_forward=True)
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                model(data(rank))
            assert isinstance(model.layer.weight, DTensor)

    def hidden(x: Tensor) -> Result:
        result = Result(x)
        result.other = model.layer.weight.sum()  # no field
        return result

    model = fsdp_c.fully_shard(Detached(hidden), reshard_after_forward=True)
    with pytest.warns(UserWarning, match="no tensor in its output"):
        model(data(rank)).other.backward()
    assert model.layer.weight.grad is not None


class Recursive(nn.Module):
    """Calls itself as its forward ends, or in the middle, from which it goes on."""

    def __init__(self, in_the_middle: bool) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.in_the_middle = in_the_middle

    def forward(self, x: Tensor, depth: int = 2) -> Tensor:
        x = self.blocks[0](torch.tanh(self.stem(x)))
        if depth and self.in_the_middle:
            x = x + self(x, depth - 1)
        x = self.blocks[1](x)
        return x if self.in_the_middle or not depth else self(x, depth - 1)


def call_itself(rank: int, n_ranks: int, is_root: bool, in_the_middle: bool) -> None:
    def build() -> nn.Module:
        model = Recursive(in_the_middle)
        return model if is_root else nn.Sequential(model, nn.Linear(WIDTH, WIDTH))

    def shard(model: nn.Module, fsdp: Any) -> None:
        for module in reversed(list(model.modules())):
            if module is model or isinstance(module, Block | Recursive):
                fsdp.fully_shard(module)

    pair = Pair(build, shard)
    for step in range(3):
        x = data(rank, step, 4, WIDTH).requires_grad_(step > 0)
        for syncs in (False, False, True):
            pair.do(lambda side, syncs=syncs: side.model.set_requires_gradient_sync(syncs))
            pair.forward(x)
            pair.backward()
            if not syncs:
                pair.eval_forward(data(rank, 9, 4, WIDTH))
        pair.optimize()


@pytest.mark.parametrize("is_root", [True, False])
@pytest.mark.parametrize("transport", ["shm", "callback"])
def test_a_module_that_calls_itself(transport: str, is_root: bool) -> None:
    """Its calls are one to backward. Torch keeps the weights of a root alone through the inner
    call."""
    for in_the_middle in (False, True) if is_root else (False,):
        env = {"FSDP_C_TRANSPORT": transport}
        harness.run_ranks(call_itself, 2, is_root, in_the_middle, env=env)


@on_ranks(2)
def test_sharded_weights_do_not_mix_with_tensors(rank: int, n_ranks: int) -> None:
    """A child called outside its unit's forward has its shards only."""
    pair = Pair(Net, models.shard_root)
    pair.step(data(rank))
    with pytest.raises(RuntimeError, match="mixed torch.Tensor and DTensor"):
        pair.ours.model.stem(data(rank))
    pair.step(data(rank, 1))


@on_ranks(2)
def test_non_root_alone(rank: int, n_ranks: int) -> None:
    pair = Pair(Net, models.shard_blocks)
    pair.step(data(rank))

    def alone(side: Side) -> Tensor:
        loss = total(side.model.blocks[1](data(rank, 1)))
        loss.backward()
        return loss.detach()

    for _ in range(2):
        pair.both(alone)
    pair.optimize()
    pair.step(data(rank, 2))


@on_ranks(1, 2)
def test_double_precision(rank: int, n_ranks: int) -> None:
    """Converted between fully_shard and the first forward."""
    tolerance = Tolerance.of(n_ranks, torch.float64)
    pair = Pair(Net, models.shard_blocks, optimizer=None, tolerance=tolerance)
    pair.do(lambda side: side.model.double(), "double")
    for step in range(2):
        pair.forward(data(rank, step, dtype=torch.float64))
        pair.backward()


@on_ranks(1, 2)
def test_exception_in_forward(rank: int, n_ranks: int) -> None:
    """The model can be used again; gradients are right in the very next step."""
    pair = Pair(Branches, models.shard_blocks)
    pair.step(data(rank))

    def fail(side: Side) -> str:
        with pytest.raises(IndexError) as caught:
            side.model(data(rank), use=(0, 7))
        side.model.reset_iter_state()
        return type(caught.value).__name__

    pair.both(fail)
    pair.step(data(rank, 1))
    pair.step(data(rank, 2))


@on_ranks(1, 2, 3)
def test_unit_whose_gradients_have_no_elements(rank: int, n_ranks: int) -> None:
    """torch refuses it; unsharded, what lies before it has gradients of zeros."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 0))
    fsdp_c.fully_shard(model[1])
    fsdp_c.fully_shard(model)
    for step in range(2):
        model(data(rank, step, 3, 4)).sum().backward()
    assert all(param.grad is None or param.grad.numel() == 0 for param in model[1].parameters())
    for param in model[0].parameters():
        assert param.grad is not None and not param.grad.full_tensor().any()

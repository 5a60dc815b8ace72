"""Programs of forward, streams and states, each short: gpu_beside.py runs them all."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
import torch.distributed.fsdp as torch_fsdp
from gpu_sides import Block, Net, Side, program
from torch import nn
from torch.distributed.checkpoint import state_dict as states
from torch.utils.checkpoint import checkpoint

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
Policy = torch_fsdp.MixedPrecisionPolicy

# ---- forward ----


def recomputed(use_reentrant: bool) -> Callable[[Side], None]:
    def run(side: Side) -> None:
        for options in ({}, {"mp_policy": Policy(BF16, F32)}):
            model = side.net(**options)
            model.run = lambda block, x: checkpoint(block, x, use_reentrant=use_reentrant)
            side.train(model)

    return run


program("checkpoints of activations")(recomputed(False))
program("checkpoints of activations, reentrant")(recomputed(True))


@program("autocast")
def autocast(side: Side) -> None:
    for dtype in (BF16, F16):
        model = side.net()
        optimizer = side.sgd(model)
        for step in range(3):
            with torch.autocast(side.device.type, dtype):
                loss = side.loss(model, step)
            loss.backward()
            side.note("loss", loss)
            side.note_gradients(model)
            optimizer.step()
            optimizer.zero_grad()


@program("forwards without a backward in between")
def evaluated(side: Side) -> None:
    for options in ({}, {"mp_policy": Policy(BF16, F32)}, {"reshard_after_forward": False}):
        model = side.net(**options)
        optimizer = side.sgd(model)
        for step in range(3):
            for mode in (torch.no_grad, torch.inference_mode, nullcontext):
                with mode():
                    model.eval()
                    side.note("looked", side.loss(model, 10 + step))
                    model.train()
            side.train(model, optimizer, step, 1)


@program("unshard and reshard by hand")
def by_hand(side: Side) -> None:
    for options in ({}, {"mp_policy": Policy(BF16, F32)}):
        model = side.net(**options)
        optimizer = side.sgd(model)
        for step in range(3):
            handles = [block.unshard(async_op=True) for block in model.blocks]
            model.unshard()
            if step == 1:
                for block, handle in zip(model.blocks, handles, strict=True):
                    handle.wait()
                    side.note("unsharded", block.up.weight)
                model.blocks[1].reshard()
            side.backward(model, step)
            for unit in side.units(model):
                unit.reshard()
            side.note_gradients(model)
            optimizer.step()
            side.note_parameters(model)
            for block in model.blocks:
                block.set_reshard_after_forward(step == 0)
                block.set_reshard_after_backward(step == 0)


@program("prefetches, forward and backward")
def prefetched(side: Side) -> None:
    for options in ({}, {"mp_policy": Policy(BF16, F32)}):
        model = side.net(**options)
        first, second, third = model.blocks
        model.set_modules_to_forward_prefetch([first, second])
        first.set_modules_to_forward_prefetch([second, third])
        third.set_modules_to_backward_prefetch([second, first])
        optimizer = side.sgd(model)
        for step in range(3):
            model.set_unshard_in_backward(step != 1)
            for block in model.blocks:
                block.set_reshard_after_forward(step != 1)
            side.train(model, optimizer, step, 1)


@program("failures in forward and backward, then on", beside="bare")
def failures(side: Side) -> None:
    """torch's own does not start over after some of them."""
    model = side.net()
    optimizer = side.sgd(model)
    side.train(model, optimizer, 0, 1)
    for step, where in enumerate(("forward", "backward", "forward"), start=1):
        model.blocks[1].fails_in = where
        with warnings.catch_warnings(), suppress(ValueError):
            side.lag()
            side.backward(model, 10)
        model.blocks[1].fails_in = ""
        side.notes = [note for note in side.notes if note[0] != "loss 10"]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the backward that failed
            with torch.no_grad():
                model(side.data(0))
        model.zero_grad()
        side.train(model, optimizer, step, 1)


@program("one unit of two blocks, a tied weight")
def one_unit_of_two(side: Side) -> None:
    class Tied(Net):
        def __init__(self) -> None:
            super().__init__()
            self.blocks[2] = Block(33)
            self.blocks[2].up.weight = self.blocks[0].up.weight

    torch.manual_seed(7)
    model = Tied().to(side.device)
    side.unit([model.blocks[0], model.blocks[2]])
    side.train(side.root(model))


# ---- streams ----


@program("a GPU that is behind, each block of it")
def behind(side: Side) -> None:
    """Gathers, sums and the optimizer are asked for long before what they wait for is done."""
    for options in ({}, {"mp_policy": Policy(BF16, F32)}, {"reshard_after_forward": False}):
        model = side.net(**options)
        for block in model.blocks:
            block.register_forward_pre_hook(lambda *_: side.lag())
            block.register_full_backward_hook(lambda *_: side.lag())
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=True)
        for step in range(3):
            side.train(model, optimizer, 2 * step, 1)
            side.lag()
            side.train(model, optimizer, 2 * step + 1, 1)


@program("ranks that are behind in turn", ranks=(2,))
def in_turn(side: Side) -> None:
    for options in ({}, {"mp_policy": Policy(BF16, F32)}):
        model = side.net(**options)
        for block in model.blocks:
            block.step = 0

            def wait(block: Any, *_: Any) -> None:
                block.step += 1
                if block.step % 2 == side.rank:
                    side.lag()

            block.register_forward_pre_hook(wait)
            block.register_full_backward_pre_hook(wait)
        side.train(model, n_steps=5)


@program("steps on another stream, then on this one")
def another_stream(side: Side) -> None:
    is_cuda = side.device.type == "cuda"
    for options in ({}, {"mp_policy": Policy(BF16, F32)}):
        model = side.net(**options)
        optimizer = side.sgd(model)
        if is_cuda:
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
        for first in range(0, 6, 2):
            with torch.cuda.stream(stream) if is_cuda else nullcontext():
                side.lag()
                side.train(model, optimizer, first, 1)
            if is_cuda:
                torch.cuda.current_stream().wait_stream(stream)
            side.train(model, optimizer, first + 1, 1)
            if is_cuda:
                stream.wait_stream(torch.cuda.current_stream())


@program("many steps without a look at the GPU", on_three=True)
def many_steps(side: Side) -> None:
    for options in ({}, {"mp_policy": Policy(BF16, F32)}):
        model = side.net(**options)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
        side.lag()
        for step in range(10):
            side.loss(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        side.note_parameters(model)


# ---- states ----


@program("from the meta device")
def from_meta(side: Side) -> None:
    for options in ({}, {"mp_policy": Policy(BF16, F32)}):
        with torch.device("meta"):
            model = Net()
        side.shard(model, **options)
        model.to_empty(device=side.device)
        side.fill(model)
        side.train(model)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


@program("state dicts of shards", on_three=True)
def sharded_states(side: Side) -> None:
    model = side.net()
    optimizer = adamw(model)
    side.train(model, optimizer)
    saved = states.get_state_dict(model, optimizer)
    side.note_all("saved", (saved[0][name] for name in sorted(saved[0])))
    other = side.net()
    other_optimizer = adamw(other)
    side.train(other, other_optimizer, 5, 1)
    states.set_state_dict(
        other, other_optimizer, model_state_dict=saved[0], optim_state_dict=saved[1]
    )
    side.train(other, other_optimizer, 6)
    third = side.net()
    third.load_state_dict(model.state_dict())
    side.train(third)


@program("whole state dicts, and a checkpoint", gathers=True, on_three=True)
def whole_states(side: Side) -> None:
    for to_cpu in (False, True):
        model = side.net(mp_policy=Policy(BF16, F32))
        optimizer = adamw(model)
        side.train(model, optimizer)
        options = states.StateDictOptions(full_state_dict=True, cpu_offload=to_cpu)
        saved = states.get_state_dict(model, optimizer, options=options)
        side.note_all("saved", (saved[0][name] for name in sorted(saved[0])))
        other = side.net(mp_policy=Policy(BF16, F32))
        other_optimizer = adamw(other)
        whole = states.StateDictOptions(full_state_dict=True)
        whole.broadcast_from_rank0 = to_cpu
        states.set_model_state_dict(other, saved[0], options=whole)
        states.set_optimizer_state_dict(other, other_optimizer, saved[1], options=whole)
        side.train(other, other_optimizer, 6)


@program("a distributed checkpoint", ranks=(1,))
def checkpointed(side: Side) -> None:
    model = side.net()
    side.train(model)
    other = side.net()
    with tempfile.TemporaryDirectory() as folder:
        dcp.save({"model": model.state_dict()}, checkpoint_id=folder)
        found = {"model": other.state_dict()}
        dcp.load(found, checkpoint_id=folder)
    other.load_state_dict(found["model"])
    side.note_parameters(other)
    side.train(other, first=5)


# ---- what fsdp_c has beside ----


@program("whole parameters, owners and clones", ranks=(1,))
def beside_training(side: Side) -> None:
    import fsdp_c

    model = side.net()
    side.train(model)
    if not side.is_ours:
        for _ in range(3):
            side.note_parameters(model)
        side.train(model, first=5)
        return
    for name, whole in fsdp_c.iter_full_params(model):
        side.note(name, whole)
    named = dict(model.named_parameters())
    owned = fsdp_c.gather_to_owner(named)
    for name in named:
        side.note(name, owned[name])
    fsdp_c.scatter_from_owner(owned)
    copy = fsdp_c.clone(model)
    fsdp_c.check_replicas(copy)
    with tempfile.TemporaryDirectory() as folder:
        fsdp_c.save_shards(model, folder)
        with torch.no_grad():
            for param in model.parameters():
                param.zero_()
        fsdp_c.load_shards(model, folder)
    side.note_parameters(copy)
    side.train(model, first=5)


@program("a run that goes on from a snapshot", on_three=True)
def gone_on(side: Side) -> None:
    import fsdp_c

    model = side.net()
    optimizer = adamw(model)
    if not side.is_ours:
        side.train(model, optimizer)
        side.train(model, optimizer, 3)
        return
    with suppress(KeyboardInterrupt), fsdp_c.Snapshots(model, optimizer) as snapshots:
        assert snapshots.resume() == 0
        side.train(model, optimizer)
        snapshots.take(3)
        side.lag()
        side.loss(model, 9).backward()  # beside which it is copied
        optimizer.step()
        raise KeyboardInterrupt  # its files stay
    model = side.net()
    optimizer = adamw(model)
    with fsdp_c.Snapshots(model, optimizer) as snapshots:
        assert snapshots.resume() == 3
        side.train(model, optimizer, 3)


@program("offload() is refused on a GPU and harms nothing", ranks=(1,))
def moved_away(side: Side) -> None:
    import fsdp_c

    model = side.net()
    optimizer = adamw(model)
    side.train(model, optimizer)
    if side.is_ours:
        may_refuse = suppress(NotImplementedError) if side.device.type == "cuda" else nullcontext()
        with may_refuse:
            fsdp_c.offload(model, optimizer)
            fsdp_c.onload(model)
    side.train(model, optimizer, 5)


@program("stats, plans and what explain says")
def told(side: Side) -> None:
    import fsdp_c

    model = side.net(mp_policy=Policy(BF16, F32))
    optimizer = adamw(model)
    side.train(model, optimizer)
    if side.is_ours:
        shards = sum(p.to_local().nbytes for p in model.parameters())
        assert fsdp_c.stats(model, optimizer).rank["parameters"] >= shards  # padded
        assert str(fsdp_c.memory_plan(model, optimizer=optimizer))
        text = str(fsdp_c.explain(model))
        assert f"core, on streams of {side.device.type}, over" in text, text
        fsdp_c.release_buffers(model)
    side.train(model, optimizer, 5)

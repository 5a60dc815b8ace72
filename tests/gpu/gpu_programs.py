"""Programs of policies, gradients and optimizers, each short: gpu_beside.py runs them all."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
import torch.distributed.fsdp as torch_fsdp
from gpu_sides import WIDTH, Block, Net, Side, local, program
from torch import Tensor, nn
from torch.distributed.tensor import Shard

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
Policy = torch_fsdp.MixedPrecisionPolicy

# ---- policies ----


@program("float32", on_three=True)
def float32(side: Side) -> None:
    side.train(side.net())


@program("parameters in bfloat16", on_three=True)
def in_bfloat16(side: Side) -> None:
    side.train(side.net(mp_policy=Policy(BF16, F32)))


@program("kept after forward", on_three=True)
def kept_after_forward(side: Side) -> None:
    side.train(side.net(reshard_after_forward=False))
    side.train(side.net(reshard_after_forward=False, mp_policy=Policy(BF16, F32)))


# Torch divides sums of float16 by 1.5 in float16, the core in float32.
@program("a policy for each unit, two of float16", on_three=True, of_three=2e-2)
def policy_for_each(side: Side) -> None:
    torch.manual_seed(7)
    model = Net().to(side.device)
    policies = [
        Policy(BF16, F32, output_dtype=BF16),
        Policy(F16, F16),
        Policy(F32, BF16, output_dtype=F16),
    ]
    for block, policy in zip(model.blocks, policies, strict=True):
        side.unit(block, mp_policy=policy)
    side.train(side.root(model, mp_policy=Policy(F16, F32, output_dtype=F32)))


@program("all in bfloat16, sums in float32", on_three=True)
def all_in_bfloat16(side: Side) -> None:
    torch.manual_seed(7)
    model = side.shard(Net().to(side.device, BF16), mp_policy=Policy(None, F32))
    for step in range(3):
        loss = model(side.data(step).bfloat16()).float().square().mean()
        loss.backward()
        side.note_gradients(model)
        side.note("loss", loss)
        model.zero_grad()  # of two ranks' sums torch rounds each, the core what is added to as well


class Large(nn.Module):
    """Units of 4 MiB."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(1024, 1024) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.pad(x, (0, 1024 - WIDTH))
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


@program("larger units", on_three=True)
def larger(side: Side) -> None:
    for options in ({}, {"mp_policy": Policy(BF16, F32)}, {"mp_policy": Policy(BF16, BF16)}):
        side.train(side.net(Large, **options))


class Mixed(nn.Module):
    """Parameters of three types; the narrow ones are used as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList()
        self.up = nn.Linear(WIDTH, 33)
        self.down = nn.Linear(33, WIDTH).bfloat16()
        self.scale = nn.Parameter(torch.rand(WIDTH).half())

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.up(x)).bfloat16()
        return self.down(hidden).float() * self.scale.float()


@program("three types in one unit", beside="bare")
def three_types(side: Side) -> None:
    side.train(side.net(Mixed))


def pre_gather(
    self: Tensor, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
) -> tuple[tuple[Tensor], None]:
    return (self.to(BF16),), None


def post_gather(
    self: Tensor, gathered: tuple[Tensor], _: Any, dtype: torch.dtype, *, out: Tensor | None = None
) -> Any:
    if out is None:
        whole = gathered[0].to(dtype)
        return whole, (whole,)
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
        out.copy_(gathered[0])
    return None


# Before torch 2.13 its own implementation runs these.
@program("shards that travel as an extension says", on_core=torch.__version__ >= "2.13")
def extended(side: Side) -> None:
    class Even(Net):
        """Which is what torch asks for."""

        def __init__(self) -> None:
            super().__init__()
            self.blocks[0] = Block(32)
            self.head = nn.Linear(WIDTH, 4)

    model = side.net(Even)
    for param in model.parameters():
        part = param._local_tensor
        part.fsdp_pre_all_gather = MethodType(pre_gather, part)
        part.fsdp_post_all_gather = MethodType(post_gather, part)
    side.train(model)


@program("sharded on dim 1")
def sharded_on_dim_1(side: Side) -> None:
    def place(param: nn.Parameter) -> Any:
        return Shard(1) if param.ndim == 2 and param.size(1) % side.n_ranks == 0 else None

    for policy in (Policy(), Policy(BF16, F32)):
        side.train(side.net(shard_placement_fn=place, mp_policy=policy))


@program("shards and gradients on the host", on_three=True)
def offloaded(side: Side) -> None:
    is_cuda = side.device.type == "cuda"
    policy = torch_fsdp.CPUOffloadPolicy(pin_memory=is_cuda)
    for options in ({}, {"mp_policy": Policy(BF16, F32)}):
        model = side.net(offload_policy=policy, **options)
        optimizer = side.sgd(model)
        for step in range(3):
            for part in range(2):
                side.lag()
                side.backward(model, 2 * step + part)
            side.note_gradients(model)
            optimizer.step()
            optimizer.zero_grad(set_to_none=step == 1)
        side.note_parameters(model)


def replicated(shape: tuple[int, ...]) -> Callable[[Side], None]:
    def run(side: Side) -> None:
        model = side.net(shape=shape)
        side.train(model)
        optimizer = side.sgd(model)
        for step in range(4):
            model.set_requires_all_reduce(step % 2 == 1)
            side.backward(model, step)
            if step % 2 == 1:
                side.note_gradients(model)
                optimizer.step()
                optimizer.zero_grad()
        side.note_parameters(model)
        side.train(side.net(shape=shape, mp_policy=Policy(BF16, F32)))

    return run


program("a mesh of (1, 1)", ranks=(1,))(replicated((1, 1)))
program("a mesh of (2, 1)", ranks=(2,))(replicated((2, 1)))
program("a mesh of (1, 2)", ranks=(2,))(replicated((1, 2)))
# NCCL adds up replicas in an order that depends on the place in the buffer, which torch packs.
program("a mesh of (3, 1)", ranks=(3,), of_three=1e-5)(replicated((3, 1)))
program("a mesh of (1, 3)", ranks=(3,))(replicated((1, 3)))


# ---- gradients ----


@program("accumulation without synchronization", on_three=True)
def accumulation(side: Side) -> None:
    for keeps, options in ((False, {}), (True, {}), (False, {"mp_policy": Policy(BF16, F32)})):
        model = side.net(**options)
        optimizer = side.sgd(model)
        for step in range(6):
            is_last = step % 3 == 2
            model.set_requires_gradient_sync(is_last)
            model.set_is_last_backward(is_last)
            if keeps:
                model.set_reshard_after_backward(is_last)
            side.backward(model, step)
            if is_last:
                side.note_gradients(model)
                optimizer.step()
                optimizer.zero_grad()
        side.note_parameters(model)


@program("accumulation of reduced gradients", on_three=True)
def accumulation_of_reduced(side: Side) -> None:
    for options in ({}, {"mp_policy": Policy(BF16, F32)}):
        model = side.net(**options)
        optimizer = side.sgd(model)
        for step in range(6):
            side.backward(model, step)
            side.note_gradients(model)
            if step % 3 == 2:
                optimizer.step()
                optimizer.zero_grad()


@program("gradients that stay, as zeros, held or dropped")
def gradients_that_stay(side: Side) -> None:
    model = side.net()
    optimizer = side.sgd(model)
    held: list[Any] = []
    for step in range(5):
        side.backward(model, step)
        side.note_gradients(model)
        side.note_all("held", held)
        held = [param.grad for param in model.parameters()]
        optimizer.step()
        if step == 2:
            next(iter(model.parameters())).grad = None
        elif step != 3:
            optimizer.zero_grad(set_to_none=step % 2 == 1)
    side.note_parameters(model)


@program("blocks that a step leaves out", on_three=True)
def left_out(side: Side) -> None:
    model = side.net()
    optimizer = side.sgd(model)
    for step, uses in enumerate(([0, 1, 2], [0, 2], [1], [2, 1, 0], [])):
        model.uses = uses
        side.backward(model, step)
        side.note_gradients(model)
        optimizer.step()
        optimizer.zero_grad(set_to_none=step != 1)


@program("a block that runs twice")
def runs_twice(side: Side) -> None:
    model = side.net()
    model.uses = [0, 1, 1, 2]
    side.train(model)


@program("several forwards before a backward")
def several_forwards(side: Side) -> None:
    model = side.net()
    optimizer = side.sgd(model)
    for step in range(3):
        losses = [side.loss(model, 2 * step + part) for part in range(2)]
        if step == 0:
            torch.stack(losses).sum().backward()
        else:
            for loss in losses[:: 1 if step == 1 else -1]:
                loss.backward()
        side.note_all("loss", losses)
        side.note_gradients(model)
        optimizer.step()
        optimizer.zero_grad()


@program("divided by another number", on_three=True)
def divided(side: Side) -> None:
    model = side.net()
    for unit in side.units(model):
        unit.set_gradient_divide_factor(4.0)
    side.train(model)


@program("gradients of inputs, a graph that is kept")
def of_inputs(side: Side) -> None:
    model = side.net()
    x = side.data(0).clone().requires_grad_()
    loss = model(x).square().mean()
    loss.backward(retain_graph=True)
    side.note("of the input", x.grad)
    side.note_gradients(model)
    model.zero_grad()
    model.unshard()
    for block in model.blocks:
        block.unshard()
    loss.backward()
    side.note("of the input", x.grad)
    side.note_gradients(model)


@program("frozen, and trained later", beside="bare")
def frozen(side: Side) -> None:
    """torch's own notices the change with its units' next gather, or not at all."""
    torch.manual_seed(7)
    model = Net().to(side.device)
    model.blocks[1].requires_grad_(False)
    model.blocks[2].up.requires_grad_(False)
    side.shard(model)
    optimizer = side.sgd(model)
    for step, frozen in enumerate((None, model.blocks[1], None, model.stem)):
        if step > 0:
            model.requires_grad_(True)
        if frozen is not None:
            frozen.requires_grad_(False)
        for part in range(2):
            side.backward(model, 2 * step + part)
            side.note_gradients(model)
            optimizer.step()
            optimizer.zero_grad()
    side.note_parameters(model)


# ---- optimizers ----


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """With decay and without."""
    params = list(model.parameters())
    return [
        {"params": [p for p in params if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in params if p.ndim == 1], "weight_decay": 0.0, "lr": 0.02},
    ]


OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "AdamW": (torch.optim.AdamW, {"lr": 0.01}),
    "AdamW, foreach": (torch.optim.AdamW, {"lr": 0.01, "foreach": True}),
    "AdamW, fused": (torch.optim.AdamW, {"lr": 0.01, "fused": True}),
    "AdamW, for-loop": (torch.optim.AdamW, {"lr": 0.01, "foreach": False}),
    "Adam with amsgrad": (torch.optim.Adam, {"lr": 0.01, "amsgrad": True}),
    "SGD, nesterov": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.5}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.01}),
}


def optimized(name: str) -> Callable[[Side], None]:
    def run(side: Side) -> None:
        cls, options = OPTIMIZERS[name]
        for policy in (Policy(), Policy(BF16, F32)):
            model = side.net(mp_policy=policy)
            optimizer = cls(groups(model), **options)
            side.train(model, optimizer)
            for param in model.parameters():
                found = optimizer.state[param]
                side.note_all("state", [v for v in found.values() if isinstance(v, Tensor)])

    return run


for each in OPTIMIZERS:
    program(each)(optimized(each))


@program("an optimizer step in backward, by hooks")
def step_in_backward(side: Side) -> None:
    model = side.net()
    for param in model.parameters():
        optimizer = torch.optim.AdamW([param], lr=0.01)

        def step(param: Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad()

        param.register_post_accumulate_grad_hook(step)
    for number in range(4):
        side.lag()
        side.backward(model, number)
    side.note_parameters(model)


# Sums of squares are added up in an order that follows the alignment of gradients, which torch
# takes from the middle of a buffer.
@program("clip_grad_norm_ of types 1, 2 and inf", gathers=True, tolerance=1e-6, on_three=True)
def clipped(side: Side) -> None:
    for policy in (Policy(), Policy(BF16, F32)):
        model = side.net(mp_policy=policy)
        optimizer = side.sgd(model)
        for step, norm_type in enumerate((2.0, 1.0, math.inf) * 2):
            side.backward(model, step)
            foreach = None if step < 3 else step % 2 == 0
            params = list(model.parameters())
            with side.clipping(waits=side.n_ranks > 1 or step < 3):
                norm: Any = nn.utils.clip_grad_norm_(params, 0.1, norm_type, foreach=foreach)
            side.note("norm", norm.full_tensor())
            side.note_gradients(model)
            optimizer.step()
            optimizer.zero_grad()


def clipped_alone(*ways: bool | None) -> Callable[[Side], None]:
    """Gradients in memory of their own; `ways`: what is said of foreach."""

    def run(side: Side) -> None:
        for dtype in (torch.float32, BF16, F16):
            model = side.net(lambda dtype=dtype: Net().to(dtype))
            for step, norm_type in enumerate((2.0, 1.0, 3.0, 0.0, math.inf, -math.inf) * 2):
                for foreach in ways:
                    clip(side, model, dtype, norm_type, foreach, step)

    def clip(
        side: Side, model: Any, dtype: Any, norm_type: float, foreach: bool | None, step: int
    ) -> None:
        generator = torch.Generator().manual_seed(step)
        params = list(model.parameters())
        for param in params:
            values = side.part(torch.randn(param.shape, generator=generator))
            param.grad = torch.empty_like(param)
            local(param.grad).copy_(values)
        with side.clipping(waits=side.n_ranks > 1 or step < 6):
            norm: Any = nn.utils.clip_grad_norm_(params, 0.1, norm_type, foreach=foreach)
        whole = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        side.note(f"norm of type {norm_type:g} of {dtype}, foreach={foreach}", whole)
        side.note_gradients(model)

    return run


program(
    "clip_grad_norm_ of gradients in memory of their own, foreach or not",
    gathers=True,
    on_core=False,
)(clipped_alone(True, False))
# By default torch takes DTensors one by one; the function for many, which plain tensors go to, adds
# up in another order on a GPU.
program(
    "clip_grad_norm_ of gradients in memory of their own", gathers=True, on_core=False, gpu_ulps=4
)(clipped_alone(None))
program("clip_grad_norm_ as plain tensors are clipped", beside="bare", ranks=(1,), on_core=False)(
    clipped_alone(None, True, False)
)


@program("torch.amp.GradScaler, with a step that is skipped", gathers=True)
def scaled(side: Side) -> None:
    model = side.net(mp_policy=Policy(F16, F32))
    optimizer = side.sgd(model)
    scaler = torch.amp.GradScaler(side.device.type, init_scale=2.0**10, growth_interval=2)
    for step in range(5):
        loss = side.loss(model, step) * (math.inf if step == 2 else 1.0)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        if step != 2:
            side.note_gradients(model)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        side.note("scale", scaler._scale)
    side.note_parameters(model)


@program("a loss that is scaled by hand")
def scaled_by_hand(side: Side) -> None:
    model = side.net(mp_policy=Policy(F16, F16))
    optimizer = side.sgd(model)
    for step in range(3):
        (side.loss(model, step) * 256).backward()
        with torch.no_grad():
            for param in model.parameters():
                param.grad.div_(256)
        side.note_gradients(model)
        optimizer.step()
        optimizer.zero_grad()

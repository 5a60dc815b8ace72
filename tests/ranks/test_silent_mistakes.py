"""What a newcomer's script passes over in silence: parameters that no unit holds, models that
differ from rank to rank, files with one rank's part. Legitimate scripts beside them stay silent.
"""

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness import cached_mesh, failure_of, run_ranks
from models import function_replaced
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.nn.parallel import DistributedDataParallel

import fsdp_c

X = torch.ones(2, 4)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.lin(x))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Linear(4, 4)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.emb(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Low(nn.Module):
    """LoRA: `base` with something small beside it."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(4, 2, bias=False)
        self.up = nn.Linear(2, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def net(seed: int = 1) -> Net:
    torch.manual_seed(seed)
    return Net()


def sharded(model: Any, *, root: bool = True, **options: Any) -> Any:
    options.setdefault("mesh", cached_mesh((dist.get_world_size(),)))
    for block in model.blocks:
        fsdp_c.fully_shard(block, **options)
    return fsdp_c.fully_shard(model, **options) if root else model


def train(model: Any, *optimizers: Any, steps: int = 2) -> None:
    optimizers = optimizers or (torch.optim.AdamW(model.parameters()),)
    for _ in range(steps):
        model(X * (1 + dist.get_rank())).square().sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@contextmanager
def warns_once(*parts: str) -> Any:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    texts = [str(item.message) for item in caught]
    assert len(texts) == 1, texts
    assert all(part in texts[0] for part in parts), texts[0]
    assert caught[0].filename == __file__, caught[0]


# ---- parameters that no unit holds ----


def outer_params(model: Net) -> set[nn.Parameter]:
    return {p for part in (model.emb, model.norm, model.head) for p in part.parameters()}


def fill(model: nn.Module) -> None:
    model.to_empty(device="cpu")
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(0.1)


def units_without_a_root() -> None:
    model = sharded(net(), root=False)
    with warns_once("'emb.weight', 'emb.bias', 'norm.weight' and 3 more of Net", "whole Net too"):
        train(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model)  # once


def units_without_a_root_in_something_larger() -> None:
    model = nn.Module()
    model.net = sharded(net(), root=False)
    with warns_once("'norm.weight' and 3 more of Net", "whole Net too"):
        train(model.net, torch.optim.SGD([*model.net.parameters()], lr=0.1))


def plain_part_of_an_optimizer_of_its_own() -> None:
    model = sharded(net(), root=False)
    units = [p for block in model.blocks for p in block.parameters()]
    outer = [p for p in model.parameters() if all(p is not q for q in units)]
    with warns_once("'emb.weight'", "fully_shard on the whole Net"):
        train(model, torch.optim.SGD(outer, lr=0.1), torch.optim.AdamW(units))


def low_rank_added_to_a_unit() -> None:
    model = sharded(net())
    for block in model.blocks:
        block.lin = Low(block.lin)
    adapters = [p for n, p in model.named_parameters() if "up" in n or "down" in n]
    with warns_once("'blocks.0.lin.down.weight'", "and 1 more of Net", "Add parameters before"):
        train(model, torch.optim.SGD(adapters, lr=0.1))


def head_added_after_some_steps() -> None:
    model = sharded(net())
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer)
    model.head = nn.Linear(4, 3)
    optimizer.add_param_group({"params": model.head.parameters()})
    with warns_once("'head.weight', 'head.bias' of Net are held by no FSDP unit"):
        train(model, optimizer)


def a_parameter_beside_the_model() -> None:
    model = sharded(net())
    scale = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.AdamW([*model.parameters(), scale])
    with warns_once("AdamW steps sharded parameters and a parameter (size (1,))"):
        (model(X) * scale).sum().backward()
        optimizer.step()


# ---- ranks that built different models ----


def seeds_that_differ() -> None:
    with warns_once("parameter 'emb.weight' and", "on rank 1 than on rank 0", "manual_seed"):
        model = sharded(net(seed=dist.get_rank()))
        train(model)


def seeds_that_differ_on_torchs_implementation() -> None:
    model = sharded(net(seed=dist.get_rank()))
    with (
        warns_once("parameter 'emb.weight' and", "on rank 1 than on rank 0"),
        function_replaced(),
    ):
        train(model)


def replicas_that_differ() -> None:
    mesh = cached_mesh((2, 1), ("replicate", "shard"))
    with warns_once("parameter 'emb.weight' and", "on rank 1 than on rank 0"):
        train(sharded(net(seed=dist.get_rank()), mesh=mesh))


def one_parameter_that_differs() -> None:
    model = net()
    with torch.no_grad():
        model.head.weight.add_(dist.get_rank())
    with warns_once("parameter 'head.weight' came to fully_shard with other values"):
        train(sharded(model))


# ---- files ----


def save_by_one_rank(folder: str) -> None:
    model = sharded(net())
    train(model)
    if dist.get_rank() == 0:
        with warns_once("torch.save writes sharded parameters", "the part of rank 0 alone"):
            torch.save(model.state_dict(), f"{folder}/model.pt")
        with warns_once("checkpoint.pt'"), open(f"{folder}/checkpoint.pt", "wb") as file:
            torch.save({"step": 3, "model": model.state_dict()}, file)


BODIES = [
    units_without_a_root,
    units_without_a_root_in_something_larger,
    plain_part_of_an_optimizer_of_its_own,
    low_rank_added_to_a_unit,
    head_added_after_some_steps,
    a_parameter_beside_the_model,
    seeds_that_differ,
    seeds_that_differ_on_torchs_implementation,
    replicas_that_differ,
    one_parameter_that_differs,
    save_by_one_rank,
]


# ---- what has to stay silent ----


def s_frozen_parts_outside_of_units() -> None:
    model = net()
    for part in (model.emb, model.norm, model.head):
        part.requires_grad_(False)
    train(sharded(model, root=False))


def s_ignored_parameters() -> None:
    model = net()
    ignored = set(model.head.parameters()) | set(model.emb.parameters())
    train(sharded(model, ignored_params=ignored))
    model = net()
    train(sharded(model, root=False, ignored_params=outer_params(model)))


def s_ignored_parameters_that_to_empty_replaces() -> None:
    for root in (True, False):
        with torch.device("meta"):
            model = Net()
        sharded(model, root=root, ignored_params=outer_params(model))
        fill(model)
        train(model)


def s_ignored_shards_that_to_empty_swaps() -> None:
    with torch.device("meta"):
        model = Net()
    fsdp_c.fully_shard(model.head)
    sharded(model, ignored_params=set(model.head.parameters()))
    fill(model)
    train(model)


def s_ignored_by_replicate() -> None:
    fsdp_c.install()
    try:
        model = net()
        replicate(model, ignored_params=set(model.head.parameters()))
    finally:
        fsdp_c.uninstall()
    train(model)


def s_averaged_by_hooks() -> None:
    model = sharded(net(), root=False)

    def average(param: Tensor) -> None:
        dist.all_reduce(param.grad)

    for part in (model.emb, model.norm, model.head):
        for param in part.parameters():
            param.register_post_accumulate_grad_hook(average)
    train(model)


def s_beside_a_replicated_model() -> None:
    class Gan(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.generator = sharded(net())
            self.critic = DistributedDataParallel(nn.Linear(4, 1))

    gan = Gan()
    one = torch.optim.AdamW(gan.generator.parameters())
    other = torch.optim.AdamW(gan.critic.parameters())
    for _ in range(2):
        gan.critic(gan.generator(X)).sum().backward()
        one.step()
        other.step()


def s_a_plain_model_of_each_rank() -> None:
    train(sharded(net()))
    torch.manual_seed(dist.get_rank())
    mine = nn.Linear(4, 4)
    train(mine, torch.optim.SGD(mine.parameters(), lr=0.1))


def s_added_before_and_as_a_unit() -> None:
    model = net()
    for block in model.blocks:
        block.lin = Low(block.lin)
    train(sharded(model))
    model = sharded(net())
    model.head = fsdp_c.fully_shard(nn.Linear(4, 3), mesh=cached_mesh((dist.get_world_size(),)))
    train(model)


def s_mean_of_weights_by_hand() -> None:
    model = sharded(net())
    ema = {name: param.detach().clone() for name, param in model.named_parameters()}
    train(model)
    for name, param in model.named_parameters():
        ema[name].lerp_(param.detach(), 0.1)


def s_tied_and_a_second_model() -> None:
    model = net()
    model.head.weight = model.emb.weight
    kept: list[Tensor] = []
    model.blocks[0].register_forward_hook(lambda m, a, out: kept.append(out.detach()))
    train(sharded(model))
    second = fsdp_c.fully_shard(nn.Linear(4, 2), mesh=cached_mesh((dist.get_world_size(),)))
    train(second)


def s_optimizer_per_group() -> None:
    model = sharded(net())
    train(model, *[torch.optim.SGD(part.parameters(), lr=0.1) for part in model.children()])


def s_own_seeds_after_the_model() -> None:
    model = sharded(net())
    torch.manual_seed(dist.get_rank())
    train(model)


def s_loaded_from_the_first_rank() -> None:
    torch.manual_seed(dist.get_rank())
    model = Net()
    full = model.state_dict() if dist.get_rank() == 0 else {}
    full = {name: value.clone() for name, value in full.items()}
    sharded(model)
    set_model_state_dict(
        model,
        full,
        options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True),
    )
    train(model)


def s_meta_on_all_ranks_but_one() -> None:
    # As accelerate's cpu_ram_efficient_loading does.
    with torch.device("cpu" if dist.get_rank() == 0 else "meta"):
        torch.manual_seed(7)
        model = Net()
    full = {n: p.clone() for n, p in model.state_dict().items()} if dist.get_rank() == 0 else {}
    model = model.to("meta")
    sharded(model)
    model.to_empty(device="cpu")
    set_model_state_dict(
        model, full, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    )
    train(model)


def s_sent_from_the_first_rank() -> None:
    model = net(seed=dist.get_rank())
    for param in model.parameters():
        dist.broadcast(param.data, 0)
    train(sharded(model))
    train(fsdp_c.shard(net(seed=dist.get_rank()), "zero3", sync=True))


def s_initialized_after_sharding() -> None:
    model = sharded(net(seed=dist.get_rank()))
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(0.1)
    train(model)
    model = sharded(net(seed=dist.get_rank()))
    for param in model.parameters():
        param.data._local_tensor.fill_(0.1)
    train(model)
    fsdp_c.load_full(model := sharded(net(seed=dist.get_rank())), net().state_dict())
    train(model)


def s_files_that_are_right(folder: str) -> None:
    model = sharded(net())
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer)
    rank = dist.get_rank()
    torch.save(model.state_dict(), f"{folder}/rank{rank}.pt")
    torch.save(model.state_dict(), io.BytesIO())
    pickle.dumps(model.state_dict())
    copy.deepcopy(model.state_dict())
    dcp.save({"model": model.state_dict(), "more": [1]}, checkpoint_id=f"{folder}/dcp")
    fsdp_c.save_shards(model, f"{folder}/shards", optimizer=optimizer)
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    if rank == 0:
        torch.save(full, f"{folder}/full.pt")
        torch.save(net().state_dict(), f"{folder}/plain.pt")
    loaded = torch.load(f"{folder}/rank{rank}.pt")
    assert torch.equal(loaded["emb.weight"]._local_tensor, model.emb.weight._local_tensor)


SILENT = [value for name, value in sorted(globals().items()) if name.startswith("s_")]
WITH_FOLDER = ("save_by_one_rank", "s_files_that_are_right")


def strictly(body: Callable[..., None], *args: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        body(*args)


def run(rank: int, n_ranks: int, name: str, *args: Any) -> str:
    body = globals()[name]
    return failure_of(strictly, body, *args) if name.startswith("s_") else failure_of(body, *args)


@pytest.mark.parametrize("name", [body.__name__ for body in (*BODIES, *SILENT)])
def test_over_shared_memory(name: str, tmp_path: Path) -> None:
    errors = run_ranks(run, 2, name, *[str(tmp_path)] * (name in WITH_FOLDER))
    assert not any(errors), "\n".join(errors)


def run_all(rank: int, n_ranks: int, names: list[str]) -> str:
    return "".join(run(rank, n_ranks, name) for name in names)


def test_over_messages() -> None:
    names = [body.__name__ for body in (*BODIES, *SILENT) if body.__name__ not in WITH_FOLDER]
    errors = run_ranks(run_all, 2, names, env={"FSDP_C_TRANSPORT": "callback"})
    assert not any(errors), "\n".join(errors)


def alone(rank: int, n_ranks: int) -> None:
    strictly(units_without_warning)


def units_without_warning() -> None:
    train(sharded(net(), root=False))


def test_one_rank_has_nobody_to_differ_from() -> None:
    run_ranks(alone, 1)

"""shard: every strategy beside DistributedDataParallel; its arguments; checkpoints across them."""

import contextlib
import copy
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from harness import cached_mesh, run_ranks
from models import Block, Net, data
from parity import on_ranks
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, ShardingStrategy
from torch.distributed.fsdp.wrap import CustomPolicy
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import fsdp_c

VOCABULARY, LENGTH, WIDTH = 13, 6, 8
STRATEGIES = list(fsdp_c.STRATEGIES)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 12), nn.GELU(), nn.Linear(12, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.mlp(x)


class Gpt(nn.Module):
    """Small, and with all that a GPT has: embeddings, a buffer, blocks, a norm, a tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight
        self.register_buffer("order", torch.arange(LENGTH), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(self.order)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(
            self.head(self.norm(x))[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()
        )


def make_gpt() -> Gpt:
    torch.manual_seed(3)
    return Gpt()


def tokens(rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(VOCABULARY, (2, LENGTH), generator=generator)


def mesh_for(name: str, n_ranks: int) -> Any:
    return (n_ranks // 2, 2) if fsdp_c.STRATEGIES[name].is_hybrid else None


def train(
    model: nn.Module, rank: int, waiting: Any, steps: range = range(3)
) -> tuple[list[float], list[float]]:
    """Losses and gradient norms: AdamW, clipping, two micro-batches of which the second counts."""
    # The eps keeps gradients that are 0 but for roundings (the keys' bias) from becoming steps.
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, eps=1e-3)
    losses, norms = [], []
    for step in steps:
        for micro in range(2):
            with waiting() if micro == 0 else contextlib.nullcontext():
                loss = model(tokens(rank, 2 * step + micro))
                (loss / 2).backward()
                losses.append(loss.item())
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        norms.append((norm.full_tensor() if isinstance(norm, DTensor) else norm).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms


def runs_on_core(model: nn.Module) -> bool:
    return all(
        group._is_bound
        for module in model.modules()
        if isinstance(module, FSDPModule)
        for group in module._get_fsdp_state()._fsdp_param_groups
    )


@on_ranks(2, 4)
def test_equals_ddp_step_by_step(rank: int, n_ranks: int) -> None:
    replicas = DistributedDataParallel(make_gpt())
    wanted = train(replicas, rank, replicas.no_sync)
    whole = replicas.module.state_dict()
    for name in STRATEGIES:
        model = make_gpt()
        assert fsdp_c.shard(model, name, mesh=mesh_for(name, n_ranks)) is model
        got = train(model, rank, lambda model=model: fsdp_c.no_sync(model))
        for ours, theirs in zip(got, wanted, strict=True):
            torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), rtol=2e-5, atol=0)
        state = model.state_dict()
        assert list(state) == list(whole), name
        for key, tensor in state.items():
            torch.testing.assert_close(tensor.full_tensor(), whole[key], rtol=2e-4, atol=2e-5)
        assert runs_on_core(model), name


@on_ranks(2)
def test_no_sync_holds_back_what_the_strategy_allows(rank: int, n_ranks: int) -> None:
    """Whole gradients and none of shards, or shards at once; the sums are the same."""
    sums = {}
    whole = sum(4 * p.numel() for p in make_gpt().parameters())
    for name in STRATEGIES:
        model = make_gpt()
        fsdp_c.shard(model, name, mesh=mesh_for(name, n_ranks))
        shards = list(model.parameters())
        with fsdp_c.no_sync(model):
            model(tokens(rank, 0)).backward()
        is_held = name in ("ddp", "zero1", "hybrid", "hybrid_zero2")
        assert all((p.grad is None) is is_held for p in shards), name
        held = fsdp_c.stats(model).rank["gradients"]
        is_whole = name in ("ddp", "zero1")  # else halves, each of them aligned
        assert held == whole if is_whole else whole / 2 <= held < whole, name
        assert fsdp_c.release_buffers(model) >= 0
        assert fsdp_c.stats(model).rank["gradients"] == held, "what waits is not for speed alone"
        model(tokens(rank, 1)).backward()
        sums[name] = [p.grad.full_tensor() for p in shards]
    for name, grads in sums.items():
        for ours, theirs in zip(grads, sums["ddp"], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6, msg=name)
    with pytest.raises(TypeError, match="no_sync needs a sharded model"):
        with fsdp_c.no_sync(Net()):
            pass


@on_ranks(2)
def test_what_is_set(rank: int, n_ranks: int) -> None:
    """Units, meshes, policies and reshard rules are those of hand-written calls."""

    def calls(model: nn.Module) -> list[Any]:
        groups = [
            (name, group)
            for name, module in model.named_modules()
            if isinstance(module, FSDPModule)
            for group in module._get_fsdp_state()._fsdp_param_groups
        ]
        return [
            (
                name,
                tuple(group.mesh_info.mesh.shape),
                group.post_forward_mesh_info is not None,
                group.fsdp_params[0].mp_policy.param_dtype,
                type(group.offload_policy).__name__,
            )
            for name, group in groups
        ]

    names = ["", "blocks.0", "blocks.1", "blocks.2"]
    pairs = cached_mesh((2, 1), ("replicate", "shard"))
    for given in (pairs, cached_mesh((2,))):
        assert calls(fsdp_c.shard(Net(), "ddp", mesh=given))[0][1] == (2, 1)
    for name, mesh, reshards in [
        ("ddp", (2, 1), False),
        ("zero1", (2,), False),
        ("zero2", (2,), False),
        ("zero3", (2,), True),
        ("hybrid", (1, 2), True),
        ("hybrid_zero2", (1, 2), False),
    ]:
        model = fsdp_c.shard(Net(), name, mesh=mesh_for(name, n_ranks))
        wanted = [(unit, mesh, reshards, None, "OffloadPolicy") for unit in names]
        assert calls(model) == wanted

    def choose(module: nn.Module) -> Any:
        is_first = module is model.blocks[0]
        own = {"reshard_after_forward": False, "precision": "fp32"}
        return own if is_first else isinstance(module, Block)

    model = Net()
    fsdp_c.shard(model, units=CustomPolicy(choose), precision=torch.bfloat16, offload=True)
    assert calls(model) == [
        (unit, (2,), unit != names[1], dtype, "CPUOffloadPolicy")
        for unit, dtype in zip(
            names, [torch.bfloat16, torch.float32, torch.bfloat16, torch.bfloat16], strict=True
        )
    ]
    model = Net()
    policy = MixedPrecisionPolicy(param_dtype=torch.float16)
    kept = model.blocks[2].up.weight
    mesh = cached_mesh((2,))
    fsdp_c.shard(
        model, "zero2", units=None, mesh=mesh, precision=policy, ignored=[kept, model.stem]
    )
    assert calls(model) == [("", (2,), False, torch.float16, "OffloadPolicy")]
    assert model.blocks[2].up.weight is kept and not isinstance(model.stem.weight, DTensor)


@on_ranks(2, 4)
def test_rank_0_is_sent_where_ranks_start_unlike(rank: int, n_ranks: int) -> None:
    for name, sync in (("ddp", None), ("zero3", True), ("hybrid", True)):
        torch.manual_seed(rank)
        model = Net()
        first = copy.deepcopy(model).state_dict()
        dist.broadcast_object_list(sent := [first], 0)
        fsdp_c.shard(model, name, mesh=mesh_for(name, n_ranks), sync=sync)
        for key, tensor in model.state_dict().items():
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            assert torch.equal(whole, sent[0][key]), key


@on_ranks(2)
def test_activation_checkpointing(rank: int, n_ranks: int) -> None:
    """Recomputes, keeps the keys and the gradients; by unit or by a rule."""
    keys = list(Net().state_dict())
    grads = []
    for checkpoint, n_calls in ((None, 1), (True, 2), (Block, 2), (lambda m: m is model.stem, 1)):
        torch.manual_seed(5)
        model = Net()
        fsdp_c.shard(model, "zero3", checkpoint=checkpoint)
        assert list(model.state_dict()) == keys
        model(data(rank)).square().sum().backward()
        assert [block.n_calls for block in model.blocks] == [n_calls] * 3
        grads.append([p.grad.to_local() for p in model.parameters()])
        assert runs_on_core(model)
    for others in grads[1:]:
        assert all(map(torch.equal, grads[0], others))


@on_ranks(2)
def test_mistakes_come_before_changes(rank: int, n_ranks: int) -> None:
    model = Net()
    for options, error, text in [
        ({"strategy": "zero4"}, ValueError, "unknown strategy 'zero4': use one of ddp.*did you"),
        ({"units": nn.Conv2d}, ValueError, "units=Conv2d matches no module"),
        ({"strategy": "hybrid"}, ValueError, r"needs a second mesh dim.*mesh=\(replicas, shards\)"),
        ({"strategy": "hybrid", "mesh": cached_mesh((2,))}, ValueError, "a mesh of two dims"),
        ({"strategy": "zero2", "mesh": (1, 2)}, ValueError, "a mesh of one dim"),
        ({"strategy": "ddp", "mesh": cached_mesh((1, 2))}, ValueError, "a mesh of all ranks"),
        ({"strategy": "ddp", "mesh": 3}, ValueError, "is for 3 ranks, but 2 are running"),
        ({"mesh": "2"}, TypeError, "mesh must be a DeviceMesh"),
        ({"mesh": True}, TypeError, "mesh must be a DeviceMesh"),
        ({"strategy": "ddp", "units": lambda m: {"offload": True}}, ValueError, "'ddp' has none"),
        ({"strategy": "ddp", "offload": True}, ValueError, "strategy 'ddp' has none"),
        ({"offload": "cpu"}, TypeError, "offload='cpu'"),
        ({"precision": "int8"}, ValueError, "precision='int8': use one of fp32, bf16, fp16"),
        ({"units": None, "checkpoint": True}, ValueError, "the model is one unit"),
        ({"checkpoint": nn.Conv2d}, ValueError, "checkpoint=Conv2d matches no module"),
        ({"checkpoint": [Block, "Blok"]}, ValueError, "^checkpoint: 'Blok' matches no module"),
        ({"checkpoint": object()}, TypeError, "checkpoint=.* is no rule.* or True"),
        ({"units": lambda m: {"mixed_precision": 1}}, ValueError, "'mixed_precision' .*precision="),
        ({"units": lambda m: {"mesh": 1}}, ValueError, "'mesh' is no option of a unit"),
        ({"strategy": ShardingStrategy.FULL_SHARD}, ValueError, "did you mean 'zero3'"),
        ({"strategy": ShardingStrategy.SHARD_GRAD_OP}, ValueError, "did you mean 'zero2'"),
        ({"units": {nn.Linear: {}}}, TypeError, "is no rule for units"),
        ({"units": [nn.Linear(2, 2)]}, ValueError, r"^units=\[Linear\] matches no module"),
        ({"ignored": "stem"}, TypeError, "ignored='stem': pass a list"),
        ({"ignored": model.stem}, TypeError, "ignored=Linear: pass a list"),
        ({"ignored": model.stem.weight}, TypeError, "ignored=a tensor of shape .* pass a list"),
        ({"ignored": [nn.Linear(2, 2)]}, ValueError, "ignored: Linear is not in Net"),
        ({"ignored": [nn.Parameter(torch.ones(3))]}, ValueError, "of shape .3,. is not in Net"),
        ({"sync": "yes"}, TypeError, "sync='yes': use True"),
    ]:
        with pytest.raises(error, match=text):
            fsdp_c.shard(model, **options)
        assert type(model) is Net and not isinstance(model.stem.weight, DTensor)
        assert not any(module._forward_pre_hooks for module in model.modules())
    fsdp_c.shard(model)
    with pytest.raises(ValueError, match="is sharded already"):
        fsdp_c.shard(model)
    with pytest.raises(TypeError, match="expects a module"):
        fsdp_c.shard([model])


@on_ranks(4)
def test_hybrid_takes_the_ranks_of_a_host(rank: int, n_ranks: int) -> None:
    with mock.patch.dict(os.environ, LOCAL_WORLD_SIZE="3"):
        with pytest.raises(ValueError, match="how 4 ranks split into several hosts"):
            fsdp_c.shard(Net(), "hybrid")
    with mock.patch.dict(os.environ, LOCAL_WORLD_SIZE="2"):
        model = fsdp_c.shard(Net(), "hybrid")
    mesh = model.stem.weight.device_mesh
    assert tuple(mesh.shape) == (2, 2) and mesh.mesh_dim_names == ("replicate", "shard")
    assert mesh.mesh.tolist() == [[0, 1], [2, 3]]


def saved(rank: int, n_ranks: int, name: str, folder: str) -> list[float]:
    """Trains two steps, saves in both formats; the losses of two more."""
    import torch.distributed.checkpoint as dcp

    model = fsdp_c.shard(make_gpt(), name, mesh=mesh_for(name, n_ranks))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, eps=1e-3)
    for step in range(2):
        train_one(model, optimizer, step)
    dcp.save({"model": model.state_dict()}, checkpoint_id=f"{folder}/dcp")
    fsdp_c.save_shards(model, f"{folder}/shards", optimizer=optimizer)
    return [train_one(model, optimizer, step) for step in (2, 3)]


def loaded(rank: int, n_ranks: int, name: str, folder: str) -> list[float]:
    import torch.distributed.checkpoint as dcp

    torch.manual_seed(77)
    model = fsdp_c.shard(Gpt(), name, mesh=mesh_for(name, n_ranks))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, eps=1e-3)
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=f"{folder}/dcp")
    model.load_state_dict(state["model"])
    first = model(tokens(0, 2)).item()
    fsdp_c.load_shards(model, f"{folder}/shards", optimizer=optimizer)
    losses = [train_one(model, optimizer, step) for step in (2, 3)]
    assert losses[0] == pytest.approx(first, rel=1e-6)
    return losses


def train_one(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> float:
    loss = model(tokens(0, step))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def test_checkpoints_cross_strategies_and_worlds(tmp_path: Path) -> None:
    """All ranks see the same data, so that the world does not matter to the losses."""
    pairs = [("ddp", 2, "zero3", 4), ("zero3", 4, "ddp", 2), ("hybrid", 4, "zero1", 2)]
    pairs += [("zero2", 2, "hybrid_zero2", 4)]
    for source, n_source, target, n_target in pairs:
        folder = str(tmp_path / f"{source}-{target}")
        wanted = run_ranks(saved, n_source, source, folder)[0]
        for got in run_ranks(loaded, n_target, target, folder):
            torch.testing.assert_close(torch.tensor(got), torch.tensor(wanted), rtol=2e-4, atol=0)

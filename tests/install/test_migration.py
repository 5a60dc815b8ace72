"""docs/migration.md: every row of its tables runs; two ways to say it give the same units."""

import ast
import re
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint.state_dict as state_dict
import torch.distributed.fsdp
from models import Block, Net, data
from parity import on_ranks
from torch import Tensor, nn
from torch.distributed._composable import checkpoint
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, wrap

import fsdp_c

PAGE = Path(__file__).resolve().parents[2] / "docs" / "migration.md"


def tables() -> list[list[list[str]]]:
    """Tables of rows of cells; the heads are the first rows."""
    found: list[list[list[str]]] = [[]]
    for line in PAGE.read_text().splitlines():
        if not line.startswith("|"):
            found += [[]] if found[-1] else []
        elif not line.startswith("| ---"):
            found[-1].append([cell.strip() for cell in line.strip("|").split(" | ")])
    return [table for table in found if table]


def code_of(cell: str) -> str:
    match = re.fullmatch(r"`(.+)`", cell.strip())
    assert match, f"{cell!r} is not code"
    return match[1]


def scope() -> dict[str, Any]:
    """What the cells may name."""
    torch.manual_seed(0)
    model = Net()
    names: dict[str, Any] = {name: getattr(fsdp_c, name) for name in fsdp_c.__all__}
    return names | {
        "torch": torch,
        "model": model,
        "Block": Block,
        "world": torch.distributed.get_world_size(),
        "loss": lambda: loss_of(model),
        "init_device_mesh": init_device_mesh,
        "checkpoint": checkpoint,
        "partial": partial,
        "MixedPrecisionPolicy": MixedPrecisionPolicy,
        "ModuleWrapPolicy": wrap.ModuleWrapPolicy,
        "get_model_state_dict": state_dict.get_model_state_dict,
        "get_optimizer_state_dict": state_dict.get_optimizer_state_dict,
        "StateDictOptions": state_dict.StateDictOptions,
    }


def loss_of(model: nn.Module) -> Tensor:
    return model(data(torch.distributed.get_rank())).float().square().sum()


def fsdp1_scope() -> dict[str, Any]:
    names = scope()
    return names | {
        "FSDP": fsdp_c.FullyShardedDataParallel,
        "checkpoint_wrapper": checkpoint_wrapper,
        "size_based_auto_wrap_policy": wrap.size_based_auto_wrap_policy,
        **{
            name: getattr(torch.distributed.fsdp, name)
            for name in ("ShardingStrategy", "MixedPrecision", "CPUOffload", "StateDictType")
        },
    }


def fsdp1_loss(code: str) -> Tensor:
    """That of a model which the code wraps; its backward runs."""
    loss = loss_of(eval(code, fsdp1_scope()))
    loss.backward()
    return loss


def run_fsdp1(code: str) -> None:
    """On a wrapped model after a backward."""
    names = fsdp1_scope()
    model = names["model"] = fsdp_c.FullyShardedDataParallel(names["model"])
    names["loss"] = lambda: loss_of(model)
    names["optimizer"] = torch.optim.AdamW(model.parameters())
    names["loss"]().backward()
    names["optimizer"].step()
    exec(code, names)


def run(code: str, sharded: bool = False) -> Any:
    names = scope()
    if sharded:
        fsdp_c.shard(names["model"], "zero2")
        names["optimizer"] = torch.optim.AdamW(names["model"].parameters())
        names["loss"]().backward()
    exec(code, names)
    names["loss"]().backward()
    return names["model"]


def units(model: Any) -> list[tuple[Any, ...]]:
    rows = fsdp_c.explain(model).units
    return [(row.unit, row.params, row.local_bytes, row.placements, row.dtypes) for row in rows]


@on_ranks(2)
def test_rows_run_and_agree(rank: int, n_ranks: int) -> None:
    fsdp1, calls, ddp, deepspeed, _ = tables()
    assert min(map(len, (fsdp1, calls, ddp, deepspeed))) > 4
    for old, by_hand, by_name in fsdp1[1:]:
        model = run(code_of(by_name))
        assert units(run(code_of(by_hand))) == units(model), by_name
        assert torch.allclose(fsdp1_loss(code_of(old)), loss_of(model)), old
    for old, new in calls[1:]:
        run_fsdp1(code_of(old))
        run(code_of(new), sharded=True)
    for old, new in ddp[1:]:
        ast.parse(code_of(old))
        assert fsdp_c.explain(run(code_of(new))).choice.strategy.name == "ddp"
    for old, new in deepspeed[1:]:
        config = ast.literal_eval(code_of(old))
        choice = fsdp_c.explain(run(code_of(new))).choice
        stage = config.get("zero_optimization", {}).get("stage", 3)
        assert choice.strategy.deepspeed_stage == stage, new


@on_ranks(2)
def test_symptoms_name_what_is_printed(rank: int, n_ranks: int) -> None:
    """Each print runs, and shows the words that the page sends its reader to."""
    names = scope()
    fsdp_c.shard(names["model"], precision="bf16")
    names["optimizer"] = torch.optim.AdamW(names["model"].parameters())
    names["loss"]().backward()
    for happens, shown, look, _ in tables()[-1][1:]:
        text = str(eval(code_of(shown), names))
        for word in re.findall(r'"([^"]+)"', look):
            assert word in text or word == "no forward has used unit", (happens, word)


@on_ranks(2)
def test_mean_over_tokens(rank: int, n_ranks: int) -> None:
    """The recipe gives the gradients of one process that has all tokens."""
    code = re.search(r"## Mean over tokens.*?```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert code
    torch.manual_seed(0)
    plain, model = (nn.Linear(6, 5) for _ in range(2))
    model.load_state_dict(plain.state_dict())
    fsdp_c.fully_shard(model)
    labels = [torch.tensor([1, 4, -100, 2]), torch.tensor([-100, -100, 3, -100])]
    names = {"torch": torch, "labels": labels[rank], "logits": model(data(rank))}
    exec(code[1], names)
    names["loss"].backward()
    everything = plain(torch.cat([data(r) for r in range(n_ranks)]))
    nn.functional.cross_entropy(everything, torch.cat(labels)).backward()
    torch.testing.assert_close(model.weight.grad.full_tensor(), plain.weight.grad)

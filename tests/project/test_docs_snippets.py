"""Every Python snippet of README and docs/ runs, on two ranks.

A snippet that sets up a process group is a whole script. The others find `model` with `blocks` of
class `Block`, an input `x`, and `folder`; where a snippet does not shard the model itself, it is
sharded, has been trained for a step and has an `optimizer`, a `scheduler`, an `average`, and
`batch_of(step)` up to `n_steps`. docs/migration.md has tests of its own.
"""

import os
import re
import tempfile
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from models import Block, Net, data
from torch import nn

import fsdp_c

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SNIPPET = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
SHARDS = re.compile(r"\b(?:fully_shard|shard|FullyShardedDataParallel)\(")
# Data that the recipe asks for is made by tests/install/test_migration.py.
ELSEWHERE = ("migration.md",)


def snippets_of(page: Path) -> list[str]:
    return SNIPPET.findall(page.read_text())


WITH_SNIPPETS = [page for page in PAGES if snippets_of(page) and page.name not in ELSEWHERE]


def scope_for(code: str, rank: int, n_ranks: int, folder: str) -> dict[str, Any]:
    torch.manual_seed(0)
    model = Net()
    names: dict[str, Any] = {
        "torch": torch,
        "nn": nn,
        "fsdp_c": fsdp_c,
        "Block": Block,
        "model": model,
        "whole_model": Net(),
        "x": data(rank),
        "rank": rank,
        "world": n_ranks,
        "folder": folder,
    }
    if not SHARDS.search(code):
        fsdp_c.shard(model, "zero3")
        optimizer = torch.optim.AdamW(model.parameters())
        model(names["x"]).sum().backward()
        optimizer.step()
        names["optimizer"] = optimizer
        names["scheduler"] = torch.optim.lr_scheduler.LinearLR(optimizer)
        names["average"] = fsdp_c.clone(model)
        names |= {"n_steps": 2, "batch_of": lambda step: data(rank, step)}
    return names


def run_snippet(rank: int, n_ranks: int, code: str, folder: str) -> None:
    os.chdir(folder)
    if "init_process_group" in code:
        dist.destroy_process_group()
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # the store is there already
        torch.manual_seed(1000 + rank)  # as of processes that are started apart
        exec(code, {"__name__": "__main__"})
    else:
        exec(code, scope_for(code, rank, n_ranks, folder))


def be_a_rank(rank: int, n_ranks: int, codes: list[str], folder: str) -> None:
    warnings.simplefilter("error", UserWarning)  # what is shown does not warn
    for code in codes:
        try:
            run_snippet(rank, n_ranks, code, folder)
        except Exception as error:
            raise AssertionError(f"this snippet fails: {error!r}\n{code}") from error


def test_there_are_snippets() -> None:
    assert len(WITH_SNIPPETS) >= 8
    assert all(snippets_of(ROOT / "docs" / name) for name in ELSEWHERE)


@pytest.mark.parametrize("page", WITH_SNIPPETS, ids=lambda page: page.name)
def test_snippets_run(page: Path) -> None:
    scripts = [code for code in snippets_of(page) if "init_process_group" in code]
    others = [code for code in snippets_of(page) if "init_process_group" not in code]
    with tempfile.TemporaryDirectory() as folder:
        for code in scripts:
            outcomes = run_ranks(be_a_rank, 2, [code], folder, fresh=True)
            assert all(outcome.ok for outcome in outcomes), outcomes[0].error + outcomes[0].output
        if others:
            run_ranks(be_a_rank, 2, others, folder, apart=True)

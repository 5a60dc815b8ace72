"""Every Python snippet of README and docs/, and every docstring's example, runs on two ranks.

A snippet that sets up a process group is a whole script. The others find `model` with `blocks` of
class `Block`, an input `x`, and `folder`; where a snippet does not shard the model itself, it is
sharded, has been trained for a step and has an `optimizer`, a `scheduler`, an `average`, and
`batch_of(step)` up to `n_steps`. docs/migration.md has tests of its own.
"""

import dataclasses
import doctest
import inspect
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
        "dataclasses": dataclasses,
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


# ---- docstrings ----


def documented() -> dict[str, Any]:
    """Our public names, and the methods that they define with words of their own."""
    described = re.findall(r"^::: fsdp_c\.(\w+)$", (ROOT / "docs/api.md").read_text(), re.MULTILINE)
    found = {}
    for name in described:
        found[name] = getattr(fsdp_c, name)
        if inspect.isclass(found[name]):
            own = {k: v for k, v in vars(found[name]).items() if not k.startswith("_")}
            methods = {k: v for k, v in own.items() if inspect.isfunction(v) and v.__doc__}
            found |= {f"{name}.{k}": method for k, method in methods.items()}
    return found


def example_of(thing: Any) -> str:
    parsed = doctest.DocTestParser().get_examples(inspect.getdoc(thing) or "")
    return "".join(example.source for example in parsed)


def test_every_public_name_has_an_example() -> None:
    """It calls what it is about; a class's shows each of its properties."""
    things = documented()
    assert len(things) > 50
    for name, thing in things.items():
        code = example_of(thing)
        assert code and "Examples:" in inspect.getdoc(thing), name
        assert not inspect.isfunction(thing) or f"{name.rpartition('.')[2]}(" in code, name
        if inspect.isclass(thing):
            properties = [k for k, v in vars(thing).items() if isinstance(v, property)]
            unseen = [k for k in properties if k[0] != "_" and f".{k}" not in code]
            assert not unseen, f"{name}: {unseen}"


def test_examples_of_docstrings_run() -> None:
    codes = [f"# {name}\n{example_of(thing)}" for name, thing in documented().items()]
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(be_a_rank, 2, codes, folder, apart=True, timeout=240)  # dozens of them

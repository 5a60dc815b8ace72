"""Units found in a model: rules, torch's policies, repeated blocks. No process group."""

import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from models import HIDDEN, WIDTH, Block, Net, Tied
from torch import nn
from torch.distributed.fsdp import wrap

from fsdp_c import STRATEGIES, find_units
from fsdp_c._compat import _versions


def names(model: nn.Module, units: Any, **options: Any) -> list[str]:
    found = find_units(model, units, **options)
    of = {module: name for name, module in model.named_modules()}
    return [of[module] for module in found]


class Gpt(nn.Module):
    """An embedding, blocks with attention and a list of experts, a norm and an output layer."""

    def __init__(self, n_tokens: int = 100, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(n_tokens, 8)
        self.positions = nn.Embedding(4, 8)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 16) for _ in range(3))
        for layer in self.layers:
            layer.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, n_tokens, bias=False)
        if tied:
            self.head.weight = self.embedding.weight


def test_repeated_blocks() -> None:
    layers = ["layers.0", "layers.1", "layers.2"]
    assert names(Gpt(), "auto") == ["embedding", *layers, "head"]
    assert names(Gpt(tied=True), "auto") == layers, "a tied parameter stays with the root"
    assert names(Gpt(n_tokens=5), "auto") == layers, "smaller than a block"
    assert names(Net(), "auto") == ["blocks.0", "blocks.1", "blocks.2"]
    chain = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU())
    assert names(chain, "auto") == ["0", "2"]
    stem = nn.Sequential(nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1))
    assert names(nn.Sequential(stem, nn.ModuleList(Block() for _ in range(2))), "auto") == [
        "1.0",
        "1.1",
    ], "blocks with parts go before single layers"
    named = Gpt()
    named._no_split_modules = ["Linear"]
    assert names(named, "auto")[-1] == "head" and "layers.0.linear1" in names(named, "auto")
    assert names(nn.Linear(3, 3), "auto") == []
    assert names(Net(), None) == names(Net(), []) == []


def test_classes_names_and_modules() -> None:
    model = Net()
    blocks = ["blocks.0", "blocks.1", "blocks.2"]
    for units in (Block, [Block], {Block}, "Block", ["Block"], "models.Block", list(model.blocks)):
        assert names(model, units) == blocks
    found = names(model, [Block, "Linear"])
    assert found[:3] == ["blocks.0.up", "blocks.0.down", "blocks.0"] and found[-1] == "stem"
    assert "" not in names(model, nn.Module), "the model itself is not among them"
    assert not any(name == "blocks" for name in names(model, nn.Module)), "a list cannot run"
    assert names(model, Block, ignored=[model.blocks[1]]) == ["blocks.0", "blocks.2"]
    bare = {p for p in model.blocks[2].parameters()}
    assert names(model, Block, ignored=bare) == blocks[:2]


def test_sizes() -> None:
    """A number counts parameters, a text bytes; what is left over goes to the module around."""
    model = Net(own=False)
    block = sum(p.numel() for p in model.blocks[0].parameters())
    up = WIDTH * HIDDEN + HIDDEN
    blocks = ["blocks.0", "blocks.1", "blocks.2"]
    assert names(model, block) == blocks
    assert names(model, f"{4 * block}B") == blocks
    assert names(model, float(block)) == names(model, "0.4kB") == blocks
    assert names(model, up)[:2] == ["blocks.0.up", "blocks.0"], "its rest is large enough too"
    huge = nn.Sequential(*(nn.Linear(512, 512, bias=False, device="meta") for _ in range(2)))
    assert names(huge, "1MiB") == ["0", "1"] and names(huge, "1 mib") == ["0", "1"]
    with pytest.raises(ValueError, match="matches no module"):
        find_units(huge, "1.1MB")
    with pytest.raises(ValueError, match="at least one parameter"):
        find_units(model, 0)


def wrapped_by_torch(model: nn.Module, policy: Any) -> list[nn.Module]:
    """What FSDP1 would wrap, in its order."""
    order: list[nn.Module] = []

    def keep(module: nn.Module, **_: Any) -> nn.Module:
        order.append(module)
        return module

    if isinstance(policy, wrap._Policy):
        wrap._post_order_apply(
            model, wrap._construct_wrap_fn(model, policy._run_policy(model, set(), {}), keep)
        )
    else:
        wrap._recursive_wrap(model, policy, keep, set(), set(), only_wrap_children=True)
    has_params = [m for m in order if list(m.parameters())]
    return [m for m in has_params if not isinstance(m, nn.ModuleList)]


@pytest.mark.parametrize("build", [Net, Gpt, Tied])
def test_policies_choose_what_fsdp1_wraps(build: Any) -> None:
    partial = functools.partial
    policies = [
        wrap.ModuleWrapPolicy({Block, nn.TransformerEncoderLayer}),
        wrap.CustomPolicy(lambda module: isinstance(module, nn.Linear)),
        partial(wrap.size_based_auto_wrap_policy, min_num_params=60),
        partial(wrap.size_based_auto_wrap_policy, min_num_params=600, force_leaf_modules={Block}),
        partial(
            wrap.transformer_auto_wrap_policy,
            transformer_layer_cls={Block, nn.TransformerEncoderLayer},
        ),
        partial(wrap.lambda_auto_wrap_policy, lambda_fn=lambda m: isinstance(m, nn.LayerNorm)),
        wrap.always_wrap_policy,
        lambda module, recurse, nonwrapped_numel: recurse or nonwrapped_numel > 40,
    ]
    for policy in policies:
        model = build()
        wanted = wrapped_by_torch(model, policy)
        if wanted:
            assert find_units(model, policy) == wanted
        else:
            with pytest.raises(ValueError, match="matches no module"):
                find_units(model, policy)


def test_units_of_torchs_own_states_before_it_had_several() -> None:
    assert _versions.groups_of(SimpleNamespace(_fsdp_param_group=None)) == []
    assert _versions.groups_of(SimpleNamespace(_fsdp_param_group=1)) == [1]
    assert _versions.groups_of(SimpleNamespace(_fsdp_param_groups=[1, 2])) == [1, 2]


def test_options_of_single_units() -> None:
    model = Net()

    def choose(module: nn.Module) -> Any:
        if module is model.blocks[1]:
            return {"reshard_after_forward": False}
        return isinstance(module, Block)

    for units in (wrap.CustomPolicy(choose), choose):
        found = find_units(model, units)
        assert found == list(model.blocks)
        assert found.options == {model.blocks[1]: {"reshard_after_forward": False}}


def test_shared_modules_and_deep_ones() -> None:
    model = Net(n_blocks=2)
    model.blocks.append(model.blocks[0])
    assert find_units(model, Block) == list(model.blocks)[:2]
    assert find_units(model, wrap.always_wrap_policy).count(model.blocks[0]) == 1
    model = Net()  # a layer that blocks share is a unit, before the blocks around it
    model.blocks[2].up = model.blocks[0].up
    assert find_units(model, "auto") == [model.blocks[0].up, *model.blocks]


def test_mistakes() -> None:
    model = Net()
    for units, error, text in [
        ("Blok", ValueError, r"units='Blok' matches no module of Net .*Block"),
        (nn.Conv2d, ValueError, "units=Conv2d matches no module"),
        ([Block, nn.Conv2d], ValueError, "Conv2d matches no module"),
        (nn.ModuleList, ValueError, "matches no module"),
        (lambda module: None, ValueError, "the predicate returned None"),
        ([3], TypeError, "neither a class"),
        (True, TypeError, "no rule for units"),
        (object(), TypeError, "no rule for units"),
        ("0MB", ValueError, "at least one byte"),
        ("", ValueError, "matches no module"),
        (10**12, ValueError, "matches no module"),
        (wrap.ModuleWrapPolicy({nn.Conv2d}), ValueError, "matches no module"),
        (wrap.CustomPolicy(lambda module: False), ValueError, "matches no module"),
    ]:
        with pytest.raises(error, match=text):
            find_units(model, units)
    with pytest.raises(TypeError, match="ignored"):
        find_units(model, Block, ignored=["blocks.0"])
    with pytest.raises(ValueError, match="matches no module"):
        find_units(model, Block, ignored=[model])


def test_table_of_strategies() -> None:
    volumes = {name: strategy.volume(4) for name, strategy in STRATEGIES.items()}
    assert volumes["ddp"] == 0.0 and STRATEGIES["ddp"].volume(1, 4) == 2 * 3 / 4
    assert volumes["zero1"] == volumes["zero2"] == 2 * 3 / 4
    assert volumes["zero3"] == 3 * 3 / 4
    assert STRATEGIES["hybrid"].volume(2, 2) == 3 / 2 + 2 / 2 / 2
    assert STRATEGIES["hybrid_zero2"].volume(2, 2) == 2 / 2 + 2 / 2 / 2
    sharding = torch.distributed.fsdp.ShardingStrategy
    assert all(strategy.fsdp1 in sharding.__members__ for strategy in STRATEGIES.values())

"""The public surface equals the installed torch's: names, signatures, classes, what is refused."""

import copy
import importlib
import inspect
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
import torch.distributed.fsdp._fully_shard as torch_package
from harness import cached_mesh, implementation, run_ranks
from test_errors import CASES, strictness
from torch import nn
from torch.distributed.fsdp._fully_shard import _fsdp_param_group as torch_group
from torch.distributed.fsdp._fully_shard import _fsdp_state as torch_state
from torch.distributed.fsdp._fully_shard import _fully_shard as torch_module

import fsdp_c
from fsdp_c._compat import _versions
from fsdp_c._fully_shard import _fsdp_param_group, _fsdp_state

# What torch has and fsdp_c lacks, by version; a version that is not listed has to be complete too.
ABSENT: dict[tuple[int, int], frozenset[str]] = {
    (2, 13): frozenset(),
    (2, 15): frozenset(),
}
KNOWN = ABSENT.get(_versions.TORCH, frozenset())

PLACES = (
    "torch.distributed.fsdp",
    "torch.distributed.fsdp._fully_shard",
    "torch.distributed._composable.fsdp",
    "torch.distributed._composable.fsdp.fully_shard",
)
PRIVATE_METHODS = ("_apply", "_get_fsdp_state", "_set_unshard_async_op")


def names() -> list[str]:
    """FSDP2's names: torch renames their module, and keeps them apart from those of FSDP1."""
    exported = {
        name
        for name in torch_fsdp.__all__
        if getattr(torch_fsdp, name).__module__ == "torch.distributed.fsdp"
    }
    return sorted({*exported, *torch_package.__all__} - KNOWN)


def signature(fn: Any) -> list[tuple[Any, ...]]:
    return [(p.name, p.kind, p.default) for p in inspect.signature(fn).parameters.values()]


def methods(cls: type) -> list[str]:
    public = [name for name, value in vars(cls).items() if callable(value) and name[0] != "_"]
    return [*public, *(name for name in PRIVATE_METHODS if name in vars(cls))]


def test_table_of_absences_names_what_is_absent() -> None:
    for name in KNOWN:
        assert hasattr(torch_fsdp, name) and not hasattr(implementation(), name)


@pytest.mark.parametrize("name", names())
def test_name(name: str) -> None:
    ours, theirs = getattr(implementation(), name), getattr(torch_fsdp, name)
    assert name in implementation().__all__
    assert signature(ours) == signature(theirs)
    assert ours.__name__ == theirs.__name__ and ours.__module__ == theirs.__module__
    if isinstance(theirs, type):
        assert issubclass(ours, theirs)
        for method in methods(theirs):
            assert signature(getattr(ours, method)) == signature(getattr(theirs, method)), method
        fields = getattr(theirs, "__dataclass_fields__", {})
        assert list(ours.__dict__.get("__dataclass_fields__", {})) == list(fields)
    else:
        assert inspect.getdoc(ours)


def test_attributes_of_the_function() -> None:
    ours, theirs = implementation().fully_shard, torch_fsdp.fully_shard
    assert {name for name in dir(theirs) if name[0] != "_"} <= set(dir(ours))
    assert signature(ours.state) == signature(theirs.state)


def test_modules_after_install() -> None:
    """Every name stays in its place, and no place shows torch's own function any more."""
    own = torch_module.fully_shard
    modules = {place: importlib.import_module(place) for place in PLACES}
    before = {place: set(vars(module)) for place, module in modules.items()}
    fsdp_c.install()
    try:
        for place, module in modules.items():
            assert set(vars(module)) == before[place], place
            assert own not in vars(module).values(), place
            for name in set(names()) & before[place]:
                shown = vars(module)[name]
                if inspect.ismodule(shown):  # _composable.fsdp.fully_shard may be either
                    shown = vars(shown)[name]
                assert shown is getattr(fsdp_c, name), (place, name)
    finally:
        fsdp_c.uninstall()
    for place, module in modules.items():
        assert set(vars(module)) == before[place], place


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (_fsdp_state.FSDPState, torch_state.FSDPState),
        (_fsdp_param_group.FSDPParamGroup, torch_group.FSDPParamGroup),
    ],
)
def test_overridden_methods_are_called_as_torchs(ours: type, theirs: type) -> None:
    """Whoever calls states and groups themselves (pipelining, trackers) finds torch's methods."""
    overridden = [n for n in vars(theirs) if n in vars(ours) and inspect.isfunction(vars(ours)[n])]
    assert len(overridden) > 4
    for name in overridden:
        if not name.startswith("__"):
            assert signature(vars(ours)[name]) == signature(vars(theirs)[name]), name


# --- a sharded module ---


def after_a_backward(fsdp: Any, n_ranks: int) -> Any:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fsdp.fully_shard(model[0], mesh=cached_mesh((n_ranks,)))
    fsdp.fully_shard(model, mesh=cached_mesh((n_ranks,)))
    model(torch.ones(2, 4)).sum().backward()
    return model


def compare_sharded_modules(rank: int, n_ranks: int) -> None:
    seen = []
    for fsdp in (torch_fsdp, implementation()):
        model = after_a_backward(fsdp, n_ranks)
        handle = model.unshard(async_op=True)
        handle.wait()
        state = model._get_fsdp_state()
        (group,) = model[0]._get_fsdp_state()._fsdp_param_groups
        objects = (model, model[0], handle, state._comm_ctx)
        extended = (state, state._state_ctx, group, group.fsdp_params[0])
        seen.append(
            (
                [cls.__qualname__ for cls in type(model).__mro__],
                [sorted(set(dir(thing)) - {"__copy__"}) for thing in objects],  # ours says why not
                [set(dir(thing)) for thing in extended],
                [sorted(vars(module)) for module in model.modules()],
            )
        )
    (*theirs, names, attributes), (*ours, our_names, our_attributes) = seen
    assert ours == theirs and our_attributes == attributes
    assert [a - b for a, b in zip(names, our_names, strict=True)] == [set()] * 4


def test_sharded_modules_show_the_same() -> None:
    run_ranks(compare_sharded_modules, 2)


# --- what is refused ---

# Where torch takes a wrong argument, or fails by accident, and fsdp_c says what is wrong:
# case of test_errors.py -> what torch raises, "" for nothing.
BETTER = {
    "empty_list": "IndexError",
    "not_a_module_in_a_list": "AttributeError",
    "mesh_of_another_type": "AttributeError",
    "child_after_parent": "TypeError",
    "module_of_two_units": "TypeError",
    "wrong_param_dtype": "",
    "wrong_reduce_dtype": "",
    "wrong_output_dtype": "",
    "policy_class": "",
    "policy_dtype": "",
    "offload_class": "",
    "offload_flag": "",
}


def kind_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:
        return type(error).__name__
    return ""


def compare_refusals(rank: int, n_ranks: int) -> None:
    differing = {}
    for name, refused in CASES.items():
        if refused.n_ranks != n_ranks:
            continue
        with strictness(refused.is_strict):
            theirs, ours = (
                kind_of(refused.build(fsdp, cached_mesh((n_ranks,))).call)
                for fsdp in (torch_fsdp, implementation())
            )
        if theirs != ours:
            differing[name] = theirs
    assert differing.items() <= BETTER.items(), differing


@pytest.mark.parametrize("n_ranks", [1, 2])
def test_refusals_of_fully_shard(n_ranks: int) -> None:
    run_ranks(compare_refusals, n_ranks)


def wrong_calls(fsdp: Any, model: Any) -> dict[str, Callable[[], Any]]:
    """Calls of the methods and functions with values that they cannot take."""
    plain = nn.Linear(2, 2)
    calls: dict[str, Callable[[], Any]] = {
        "share": lambda: fsdp.share_comm_ctx([model, plain]),
        "share one": lambda: fsdp.share_comm_ctx(model),
        "register": lambda: fsdp.register_fsdp_forward_method(model, "missing"),
        "dims": lambda: fsdp.DataParallelMeshDims(),
        "policy": lambda: fsdp.MixedPrecisionPolicy(None, None, None, True, None),
        "state": lambda: plain._get_fsdp_state(),
        "deepcopy": lambda: copy.deepcopy(model),
        "deepcopy of a unit": lambda: copy.deepcopy(model[0]),
        "pickle": lambda: pickle.dumps(model[0]),
        "child reset": lambda: model[0].reset_iter_state(),
        "stream": lambda: model.set_all_reduce_hook(print, stream=1, more=2),
        "no hook": lambda: model.set_all_reduce_hook(),
        "sync by position": lambda: model.set_requires_gradient_sync(True, True),
        "buffers of a float": lambda: model.set_reduce_scatter_max_input_buffers(1.0),
    }
    for value in (2, None, "yes"):
        calls[f"reshard {value}"] = lambda value=value: model.set_reshard_after_forward(value)
        calls[f"reshard all {value}"] = lambda value=value: model.set_reshard_after_forward(
            value, False
        )
    for value in (True, "1", 0, -1):
        calls[f"buffers {value}"] = lambda value=value: model.set_reduce_scatter_max_input_buffers(
            value
        )
    for value in ([plain], [model, None], None):
        for way in ("forward", "backward"):
            setter = getattr(model, f"set_modules_to_{way}_prefetch")
            calls[f"prefetch {way} {value}"] = lambda value=value, setter=setter: setter(value)
    if hasattr(fsdp.FSDPModule, "finalize_backward"):
        calls |= {
            "finalize": lambda: model.finalize_backward(),
            "finalize child": lambda: model[0].finalize_backward(async_op=True),
            "finalize by position": lambda: model.finalize_backward(True),
            "manual of a child": lambda: model[0].set_manual_backward_finalization(True),
            "manual by name": lambda: model.set_manual_backward_finalization(on=True),
            "keep by position": lambda: model.set_keep_unsharded_storage(True, True),
        }
    return calls


def compare_wrong_calls(rank: int, n_ranks: int) -> None:
    seen = []
    for fsdp in (torch_fsdp, implementation()):
        model = after_a_backward(fsdp, n_ranks)
        outcomes = {}
        for name, call in wrong_calls(fsdp, model).items():
            try:
                outcome = ("nothing", call())
            except Exception as error:
                outcome = (type(error).__name__, str(error))
            outcomes[name] = outcome
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model.set_reduce_scatter_divide_factor(2.0)
        outcomes["deprecated"] = [(item.category, str(item.message)) for item in caught]
        seen.append(outcomes)
    theirs, ours = seen
    assert ours == theirs
    accepted = {name for name, outcome in theirs.items() if outcome[0] == "nothing"}
    assert not accepted, accepted


def test_refusals_of_methods() -> None:
    run_ranks(compare_wrong_calls, 2)

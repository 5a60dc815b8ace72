"""What the command line names: a model (ours, a function's, a config's), inputs of forward."""

from __future__ import annotations

import importlib
import inspect
import json
import math
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fsdp_c import _text
from fsdp_c._estimate._models import CONFIGS, build

# Tokens of a sequence, of a model that says nothing of it.
SEQUENCE = 1024
_LONGEST = 4096  # of what a config allows

_DTYPES = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}


def model_named(name: str, sizes: dict[str, int | None], seq: int | None) -> tuple[nn.Module, int]:
    """The module, on the meta device where that can be, and the sequence length it is made for.

    Args:
        name: of `CONFIGS`; ``module:function``, ``file.py:function``; a folder or file of a config.
        sizes: fields of `Config` that replace the named ones; None: as they are.

    Raises:
        ValueError, TypeError, ImportError: what does not name a module, with the cure.
    """
    if name in CONFIGS:
        config = CONFIGS[name].replaced(**sizes, sequence=seq)
        return build(config), config.sequence
    for field, size in sizes.items():
        if size is not None:
            raise ValueError(f"--{field.replace('_', '-')} is for gpt and llama, not {name}")
    if ":" in name:
        return _made_by(name), SEQUENCE
    if os.path.exists(name) and not name.endswith(".py"):
        return _of_config(name)
    raise ValueError(
        f"--model {name} is none of {', '.join(CONFIGS)}, no config, and names no function as"
        f" module:function or file.py:function{_text.did_you_mean(name, CONFIGS)}"
    )


def optimizer_named(name: str) -> Any:
    """What ``estimate`` takes: of ``module:function`` or ``file.py:function`` that function, of
    ``none`` None, else the name."""
    if name.lower() == "none":
        return None
    return _found(name) if ":" in name else name


def _found(name: str) -> Callable[..., Any]:
    place, _, function = name.rpartition(":")
    module = _imported(place)
    found = getattr(module, function, None)
    if not callable(found):
        there = [n for n, value in vars(module).items() if callable(value) and n[0] != "_"]
        hint = _text.did_you_mean(function, there)
        raise ValueError(f"module {module.__name__} has no function {function}{hint}")
    return found


def _made_by(name: str) -> nn.Module:
    make = _found(name)
    if isinstance(make, nn.Module):
        return make
    _check_takes_nothing(make, name)
    made = _on_meta(make, name)
    if not isinstance(made, nn.Module):
        raise TypeError(f"{name} returned a {type(made).__name__}, not a module")
    return made


def _imported(place: str) -> Any:
    """By name from the working folder, or a file, which finds what lies beside it."""
    if not place.endswith(".py"):
        sys.path.insert(0, os.getcwd())
        try:
            return importlib.import_module(place)
        except ModuleNotFoundError as error:
            if error.name != place.partition(".")[0]:
                raise  # what it imports itself
            raise ValueError(
                f"there is no module {place} on the path or in {os.getcwd()}: start there, or name"
                " the file as file.py:function"
            ) from None
    if not os.path.isfile(place):
        raise ValueError(f"there is no file {place}")
    sys.path.insert(0, os.path.dirname(os.path.abspath(place)))
    return importlib.import_module(os.path.basename(place).removesuffix(".py"))


def _check_takes_nothing(make: Callable[..., Any], name: str) -> None:
    try:
        signature = inspect.signature(make)
    except (TypeError, ValueError):  # of a builtin
        return
    try:
        signature.bind()
    except TypeError as error:
        raise TypeError(
            f"{name}{signature} is called without arguments ({error}): name a function that calls"
            " it with yours"
        ) from None


def _on_meta(make: Callable[[], Any], name: str) -> Any:
    try:
        with torch.device("meta"):
            return make()
    except (RuntimeError, NotImplementedError) as error:  # it reads values, which meta has not
        why = str(error).partition("\n")[0]
        print(f"estimate: {name} is built in memory, since on meta: {why}", file=sys.stderr)
    return make()


def _of_config(path: str) -> tuple[nn.Module, int]:
    """From a config alone; nothing is downloaded."""
    try:
        import transformers
    except ImportError:
        raise ImportError(f"--model {path}: a config needs transformers to be installed") from None
    file = os.path.join(path, "config.json") if os.path.isdir(path) else path
    with open(file) as opened:
        values = json.load(opened)
    config = transformers.AutoConfig.for_model(values.pop("model_type"), **values)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    model.config.use_cache = False
    return model, min(getattr(config, "max_position_embeddings", SEQUENCE), _LONGEST)


# ---- inputs ----


def inputs_named(text: str) -> tuple[torch.Tensor, ...]:
    """``"1x3x224x224,long:1x128"``: sizes, each after a dtype or float32; meta tensors.

    Raises:
        ValueError: what is no size or no dtype.
    """
    return tuple(map(_input_named, text.split(",")))


def _input_named(text: str) -> torch.Tensor:
    dtype, _, sizes = text.strip().rpartition(":")
    if dtype and dtype not in _DTYPES:
        hint = _text.did_you_mean(dtype, _DTYPES)
        raise ValueError(f"--inputs {text}: torch has no dtype {dtype!r}{hint}")
    try:
        shape = tuple(map(int, sizes.split("x")))
    except ValueError:
        shape = (0,)
    if math.prod(shape) < 1 or min(shape) < 1:
        raise ValueError(f"--inputs {text}: write sizes such as 8x3x224x224, or long:8x128")
    return torch.empty(shape, dtype=_DTYPES[dtype or "float32"], device="meta")

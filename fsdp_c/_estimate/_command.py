"""python -m fsdp_c estimate: an estimate from the command line."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

_SIZES = ("layers", "hidden", "heads", "kv-heads", "mlp", "vocabulary")


def parser() -> argparse.ArgumentParser:
    from fsdp_c._estimate._hardware import HARDWARE
    from fsdp_c._estimate._models import CONFIGS
    from fsdp_c.strategy import STRATEGIES

    parser = argparse.ArgumentParser(
        "python -m fsdp_c estimate",
        description="Says what training a model takes on hardware that need not be there.",
    )
    parser.add_argument(
        "--model",
        default="gpt",
        help=f"{', '.join(CONFIGS)}; package.module:function that returns a module; or, with"
        " transformers installed, a folder or file with a config.json",
    )
    for size in _SIZES:
        parser.add_argument(f"--{size}", type=int, help="of gpt and llama; default: the model's")
    parser.add_argument("--seq", type=int, help="tokens of a sequence; default: the model's")
    parser.add_argument("--batch", type=int, default=1, help="sequences of a rank")
    parser.add_argument("--micro-batches", type=int, default=1, help="per optimizer step")
    parser.add_argument("--world-size", type=int, required=True)
    parser.add_argument("--ranks-per-host", type=int)
    parser.add_argument("--shards", type=int, help="ranks of a shard group of hybrid strategies")
    parser.add_argument("--strategy", default="zero3", help=", ".join(STRATEGIES))
    parser.add_argument("--hardware", default="h100", help=f"{', '.join(HARDWARE)}, here")
    parser.add_argument("--precision", default="bf16", help="fp32, bf16, fp16, bf16-true")
    parser.add_argument("--optimizer", default="AdamW", help="a class of torch.optim, or none")
    parser.add_argument("--units", default="auto", help="auto, a class name, or a size as 200MB")
    parser.add_argument(
        "--checkpoint",
        nargs="?",
        const=True,
        default=False,
        metavar="CLASS",
        help="activation checkpointing: of each unit, or of a class of modules",
    )
    parser.add_argument(
        "--measured",
        type=_measured,
        metavar="RANKS:SECONDS",
        help="of a step that was run, on few ranks and otherwise as described",
    )
    parser.add_argument("--offload", action="store_true", help="shards live on the host")
    parser.add_argument("--sources", action="store_true", help="of the hardware's figures")
    return parser


def main(arguments: Sequence[str]) -> None:
    args = parser().parse_args(list(arguments))
    try:
        print(_estimated(args))
    except (ValueError, TypeError, ImportError) as error:
        sys.exit(f"estimate: {str(error).removeprefix('estimate: ')}")


def _estimated(args: argparse.Namespace) -> str:
    import torch

    from fsdp_c._estimate import estimate

    optimizer = None if args.optimizer == "none" else getattr(torch.optim, args.optimizer, None)
    if optimizer is None and args.optimizer != "none":
        raise ValueError(f"torch.optim has no {args.optimizer}")
    model, sequence = _model(args)
    found = estimate(
        model,
        world_size=args.world_size,
        strategy=args.strategy,
        hardware=args.hardware,
        batch=args.batch,
        seq=args.seq or sequence,
        precision=args.precision,
        optimizer=optimizer,
        units=args.units,
        checkpoint=args.checkpoint,
        offload=args.offload,
        micro_batches=args.micro_batches,
        shards=args.shards,
        ranks_per_host=args.ranks_per_host,
        measured=args.measured,
    )
    lines = [str(found)]
    if args.sources:
        lines += ["", *found.setting.hardware.sources]
    return "\n".join(lines)


def _measured(text: str) -> tuple[int, float]:
    ranks, _, seconds = text.partition(":")
    try:
        return int(ranks), float(seconds)
    except ValueError:
        message = f"{text!r}: pass ranks and seconds of a step, such as 8:2.9"
        raise argparse.ArgumentTypeError(message) from None


def _model(args: argparse.Namespace) -> tuple[Any, int]:
    """The module, and the sequence length that it was made for."""
    from fsdp_c._estimate._models import CONFIGS, build

    sizes = {name.replace("-", "_"): getattr(args, name.replace("-", "_")) for name in _SIZES}
    if args.model in CONFIGS:
        config = CONFIGS[args.model].replaced(**sizes, sequence=args.seq)
        return build(config), config.sequence
    given = [name for name, value in sizes.items() if value is not None]
    if given:
        raise ValueError(f"--{given[0].replace('_', '-')} is for gpt and llama, not {args.model}")
    if os.path.exists(args.model):
        return _hugging_face(args.model)
    if ":" in args.model:
        return _made_by(args.model), 1024
    raise ValueError(
        f"--model {args.model} is none of {', '.join(CONFIGS)}, no file or folder, and names no"
        " function as package.module:function"
    )


def _made_by(name: str) -> Any:
    import torch

    module, _, function = name.partition(":")
    sys.path.insert(0, os.getcwd())
    make = getattr(importlib.import_module(module), function, None)
    if not callable(make):
        raise ValueError(f"module {module} has no function {function}")
    with torch.device("meta"):
        return make()


def _hugging_face(path: str) -> tuple[Any, int]:
    """From a config alone; nothing is downloaded."""
    import torch

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
    return model, min(getattr(config, "max_position_embeddings", 1024), 4096)

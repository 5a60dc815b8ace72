"""python -m fsdp_c estimate: an estimate from the command line."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence

_ANY_INPUTS = (
    "without --inputs it gets token ids: name with --inputs what its forward takes, such as"
    " --inputs 8x3x224x224"
)
_OTHER_INPUTS = (
    "let --inputs name what its forward takes; if it is the loss, a mean of squares, that fails,"
    " call fsdp_c.estimate() in Python with a loss="
)
_SIZES = ("layers", "hidden", "heads", "kv-heads", "mlp", "vocabulary")


def parser() -> argparse.ArgumentParser:
    from fsdp_c._estimate._hardware import HARDWARE
    from fsdp_c._estimate._models import CONFIGS
    from fsdp_c._estimate._named import SEQUENCE
    from fsdp_c.strategy import STRATEGIES

    parser = argparse.ArgumentParser(
        "python -m fsdp_c estimate",
        description="Says what training a model takes on hardware that need not be there.",
    )
    add = parser.add_argument
    add(
        "--model",
        default="gpt",
        help=f"{', '.join(CONFIGS)}; module:function or file.py:function, a function or a class"
        " that returns a module when it is called without arguments; or, with transformers"
        " installed, a folder or file with a config.json (default: %(default)s)",
    )
    for size in _SIZES:
        add(f"--{size}", type=int, help="of gpt and llama (default: the model's)")
    add("--seq", type=int, help=f"tokens of a sequence (default: the model's, else {SEQUENCE})")
    add("--batch", type=int, default=1, help="sequences of a rank (default: %(default)s)")
    add(
        "--inputs",
        metavar="SIZES",
        help="what forward takes of one rank's batch in the place of token ids, such as"
        " 8x3x224x224,long:8x128: tensors of float32 or of the dtype before the colon; the loss is"
        " then a mean of squares (default: token ids, --batch of --seq, and cross-entropy)",
    )
    add("--micro-batches", type=int, default=1, help="per optimizer step (default: %(default)s)")
    add("--world-size", type=int, required=True, help="ranks in all (no default: it is required)")
    add(
        "--ranks-per-host",
        type=int,
        help="ranks that share a host, and its memory if they are CPU ranks (default: one for each"
        " GPU of such a host; with --hardware here all of them)",
    )
    add(
        "--shards",
        type=int,
        help="ranks of a shard group of hybrid strategies (default: those of a host)",
    )
    add("--strategy", default="zero3", help=f"{', '.join(STRATEGIES)} (default: %(default)s)")
    add(
        "--hardware",
        default="h100",
        help=f"{', '.join(HARDWARE)}, or here: CPU ranks of this host, whose speed is measured now"
        " (default: %(default)s)",
    )
    add(
        "--precision",
        default="bf16",
        help="fp32, bf16, fp16, bf16-true (default: %(default)s, parameters in their own dtype)",
    )
    add(
        "--optimizer",
        default="AdamW",
        help="a class of torch.optim; module:function or file.py:function, called with a list of"
        " parameters; or none (default: %(default)s)",
    )
    add(
        "--units",
        default="auto",
        help="auto, a class name, or a size as 200MB (default: %(default)s, repeated blocks)",
    )
    add(
        "--checkpoint",
        nargs="?",
        const=True,
        default=False,
        metavar="CLASS",
        help="activation checkpointing: of each unit, or of a class of modules (default: none)",
    )
    add(
        "--measured",
        type=_measured,
        metavar="RANKS:SECONDS",
        help="of a step that was run, on few ranks and otherwise as described (default: none, times"
        " follow from the hardware's figures)",
    )
    add(
        "--offload",
        action="store_true",
        help="shards live on the host (default: on the device)",
    )
    add(
        "--sources",
        action="store_true",
        help="tell those of the hardware's figures (default: do not)",
    )
    return parser


def main(arguments: Sequence[str]) -> None:
    args = parser().parse_args(list(arguments))
    from fsdp_c._estimate._flags import in_flags
    from fsdp_c._estimate._trace import NotTraced

    try:
        print(_estimated(args))
    except NotTraced as error:
        cure = _OTHER_INPUTS if args.inputs else _ANY_INPUTS
        sys.exit(f"{error.why}; {cure}")
    except (ValueError, TypeError, ImportError) as error:
        text = in_flags(str(error), has_inputs=bool(args.inputs))
        sys.exit(f"estimate: {text.removeprefix('estimate: ')}")


def _estimated(args: argparse.Namespace) -> str:
    from fsdp_c._estimate import _named, estimate
    from fsdp_c._estimate._flags import in_flags

    if args.inputs and (args.seq is not None or args.batch != 1):
        raise ValueError("--inputs has the batch's sizes: leave out --seq and --batch")
    sizes = {name.replace("-", "_"): getattr(args, name.replace("-", "_")) for name in _SIZES}
    model, sequence = _named.model_named(args.model, sizes, args.seq)
    found = estimate(
        model,
        world_size=args.world_size,
        strategy=args.strategy,
        hardware=args.hardware,
        batch=args.batch,
        seq=None if args.inputs else args.seq or sequence,
        inputs=_named.inputs_named(args.inputs) if args.inputs else None,
        precision=args.precision,
        optimizer=_named.optimizer_named(args.optimizer),
        units=args.units,
        checkpoint=args.checkpoint,
        offload=args.offload,
        micro_batches=args.micro_batches,
        shards=args.shards,
        ranks_per_host=args.ranks_per_host,
        measured=args.measured,
    )
    advice = in_flags(found.advice, has_inputs=bool(args.inputs))
    lines = [str(dataclasses.replace(found, advice=advice))]
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

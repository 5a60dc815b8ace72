"""The command-line options that the demo and the training script share."""

import argparse
from pathlib import Path

IMPLEMENTATIONS = ("fsdp_c", "torch")


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not a positive number")
    return value


def width(text: str) -> int:
    value = positive(text)
    if value % 32:
        raise argparse.ArgumentTypeError(f"{value} is not a multiple of 32, the width of a head")
    return value


def training_options() -> argparse.ArgumentParser:
    """Options of one training run; the demo hands them on."""
    parser = argparse.ArgumentParser(add_help=False)
    add = parser.add_argument
    add("--impl", choices=IMPLEMENTATIONS, default="fsdp_c", help="whose fully_shard to train with")
    add("--steps", type=positive, default=300, help="optimizer steps in all")
    add("--batch", type=positive, default=8, help="rows of a batch, on each rank")
    add("--seq", type=positive, default=128, help="bytes in a row")
    add("--layers", type=positive, default=4, help="transformer blocks")
    add("--dim", type=width, default=128, help="width of the model, a multiple of 32")
    add("--lr", type=float, default=6e-3, help="peak learning rate")
    add("--dtype", choices=("fp32", "bf16"), default="fp32", help="dtype of forward and backward")
    add("--seed", type=int, default=0, help="of the weights, the batches and the sample")
    add("--resume", action="store_true", help="go on from the last checkpoint below --out")
    add("--save-every", type=positive, default=100, help="steps between checkpoints")
    add("--snapshots", action="store_true", help="keep each step in memory, and go on from there")
    add("--die-at", type=int, default=-1, help="step in which the last rank kills itself, once")
    add("--sample-bytes", type=int, default=400, help="length of the text to write at the end")
    add("--out", type=Path, default=Path("demo-out"), help="folder of logs, checkpoints, picture")
    return parser


def to_arguments(options: argparse.Namespace) -> list[str]:
    """The command line that `training_options` reads back as `options`."""
    arguments = []
    for action in training_options()._actions:
        value = getattr(options, action.dest)
        if value is True:
            arguments.append(action.option_strings[0])
        elif value is not False:
            arguments += [action.option_strings[0], str(value)]
    return arguments

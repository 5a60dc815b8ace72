"""A device for tests, "fake": host memory behind streams whose work is done as late, or as early,
as events allow (tests/device/fake). Built once; loaded in ranks that have run no backward yet."""

import functools
import importlib.util
import os
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from types import ModuleType
from typing import Any

import build_script
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

ROOT = Path(__file__).resolve().parents[2]
SOURCE = "tests/device/fake/fake.cpp"
NAME = "fake"

# The core's streams by the numbers that the device gives them; 0 is the default one, and on from
# 50 are the script's own, on from 100 those of process groups.
COMPUTE, COPY_IN, GATHER, REDUCE, ALL_REDUCE = range(5)
HOST = -1


class Kind(IntEnum):
    """What the device is told about order: `Kind` in streams.h."""

    WAIT = 0
    RECORD = 1
    RECORD_STREAM = 2
    HOST_WAIT = 3


@dataclass(frozen=True)
class Order:
    """When streams go on: `Order` in streams.h."""

    kind: int
    ahead: tuple[int, ...] = ()
    seed: int = 0


LAZY = Order(0)


def ahead(*streams: int) -> Order:
    """These have always done all that they have, and the others nothing but what they wait for."""
    return Order(1, streams)


def shuffled(seed: int) -> Order:
    return Order(2, (), seed)


def place(script: ModuleType) -> Path:
    return (
        ROOT / script.Toolchain(is_test=True).folder("fake", *facts(script)) / f"{NAME}_device.so"
    )


def facts(script: ModuleType) -> tuple[str, str]:
    return str(script.Torch.installed()), sysconfig.get_config_var("EXT_SUFFIX")


@functools.cache
def build() -> None:
    """Compiles the library where a source has changed."""
    script = build_script.load()
    before = Path.cwd()
    try:
        with script.build_lock():
            tools, library = script.Toolchain(is_test=True), place(script)
            there = script.Torch.installed()
            command = [*tools.cxx_command(there), f"-DTORCH_EXTENSION_NAME={NAME}_device", "-O0"]
            made = script.compile_object(SOURCE, command, library.parent.relative_to(ROOT))
            flags = [*tools.mode_flags(), "-shared"]
            script.link(library, [*tools.cxx, *flags], [made], there.link_flags())
    finally:
        os.chdir(before)


class Module(ModuleType):
    """What torch looks up as `torch.fake`."""

    Stream, Event = torch.Stream, torch.Event
    is_available = is_initialized = staticmethod(lambda: True)
    device_count = staticmethod(lambda: 1)
    current_device = staticmethod(lambda: 0)
    set_device = staticmethod(lambda device: None)
    _is_in_bad_fork = staticmethod(lambda: False)
    manual_seed_all = staticmethod(lambda seed: None)
    get_amp_supported_dtype = staticmethod(lambda: [torch.bfloat16, torch.float16])
    current_stream = staticmethod(lambda device=None: torch.accelerator.current_stream(NAME))


@functools.cache
def load() -> Any:
    """The library's functions, once in a process; whoever starts ranks has built it."""
    spec = importlib.util.spec_from_file_location(f"{NAME}_device", place(build_script.load()))
    assert spec is not None and spec.loader is not None
    torch.utils.rename_privateuse1_backend(NAME)
    device = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(device)
    torch._register_device_module(NAME, Module(f"torch.{NAME}"))

    def make(store: Any, rank: int, size: int, timeout: Any) -> Any:
        def inner(n: int) -> Any:
            return dist.ProcessGroupGloo(dist.PrefixStore(str(n), store), rank, size, timeout)

        return device.group(rank, size, inner)

    dist.Backend.register_backend("streamed", make, devices=[NAME])
    return device


@functools.cache
def mesh_of(shape: Sequence[int]) -> DeviceMesh:
    """Of all ranks, over process groups whose collectives on the device have streams."""
    load()
    rows = torch.arange(dist.get_world_size()).view(*shape)
    names = ("replicate", "shard")[-len(shape) :]
    mine = []
    for dim in range(len(shape)):
        lines = rows.movedim(dim, -1).reshape(-1, shape[dim]).tolist()
        groups = {
            tuple(line): dist.new_group(line, backend="cpu:gloo,fake:streamed") for line in lines
        }
        mine += [group for line, group in groups.items() if dist.get_rank() in line]
    return DeviceMesh.from_group(
        mine if len(mine) > 1 else mine[0], NAME, mesh=rows, mesh_dim_names=names
    )


@contextmanager
def order(chosen: Order) -> Iterator[Any]:
    """What is enqueued in here is done in this order; at the end all of it is done."""
    device = load()
    device.start_again()
    device.set_order(chosen.kind, set(chosen.ahead), chosen.seed)
    try:
        yield device
    finally:
        device.watch(Kind.WAIT, -1)
        device.set_order(LAZY.kind, set(), 0)
        device.synchronize()

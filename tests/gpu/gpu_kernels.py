"""The GPU kernels through ctypes: plans, launches, and the same kernels run on the host."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent.parent
LIBRARY = ROOT / "fsdp_c" / "libfsdp_c_cuda.so"
SOURCES = (
    "tests/gpu/helper.c csrc/kernels/cuda/load.c csrc/kernels/cuda/runs.c"
    " csrc/kernels/kern_optim.c csrc/base/alloc.c csrc/base/dtype.c csrc/base/status.c"
).split()
# In the order of FC_DTYPE_MAP.
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.uint8, torch.int8]
DTYPES += [torch.int16, torch.int32, torch.int64]


class KernelError(Exception):
    """What a plan or a launch answered."""


def build_helper(folder: Path) -> Path:
    """Compiles the helper with gcc; a second or two."""
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / "gpu_check_helper.so"
    command = "gcc -std=gnu11 -O2 -ffp-contract=off -fPIC -shared -fvisibility=hidden".split()
    command += ["-Icsrc", *SOURCES, "-o", str(target), "-lm", "-ldl", "-pthread"]
    subprocess.run(command, cwd=ROOT, check=True)
    return target


class _Launch(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_void_p)
        for name in ("plan", "runs", "stretches", "slots", "addresses", "stream")
    ]


@dataclass(frozen=True)
class Side:
    """One side of a block: bytes from the base, and bytes from line to line, plane to plane."""

    base: int
    dtype: torch.dtype
    at: int = 0
    line_stride: int = 0
    plane_stride: int = 0

    def numbers(self) -> list[int]:
        return [self.base, DTYPES.index(self.dtype), self.at, self.line_stride, self.plane_stride]


class Kernels:
    """One set of kernels and the device whose memory they work on."""

    def __init__(self, helper: Path, library: Path | None) -> None:
        self._c = ctypes.CDLL(str(helper))
        for name in ("emulated", "open", "plan_new", "plan_runs", "plan_stretches", "plan_slots"):
            getattr(self._c, f"check_{name}").restype = ctypes.c_void_p
        for name in ("check_error_text", "check_message"):
            getattr(self._c, name).restype = ctypes.c_char_p
        self._c.check_plan_parts.restype = ctypes.c_uint32
        if library is None:
            self.device = torch.device("cpu")
            table = self._c.check_emulated()
        else:
            self.device = torch.device("cuda")
            table = self._c.check_open(str(library).encode())
            if table is None:
                raise KernelError(self.message())
        self.table = ctypes.c_void_p(table)

    def plan(self) -> Plan:
        return Plan(self)

    def message(self) -> str:
        return self._c.check_message().decode()

    def check(self, error: int) -> None:
        if error != 0:
            raise KernelError(self._c.check_error_text(self.table, error).decode())


class Plan:
    """A plan; `seal` copies it to the device, and launches follow, which use copies in turns."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels, self._c = kernels, kernels._c
        self._plan = ctypes.c_void_p(self._c.check_plan_new())
        self._copies: list[list[torch.Tensor]] = []
        self._n_launches = 0

    def __del__(self) -> None:
        self._c.check_plan_free(self._plan)

    def _accept(self, status: int) -> None:
        if status != 0:
            raise KernelError(self._kernels.message())

    def add(self, shape: tuple[int, int, int], to: Side, source: Side) -> None:
        numbers = [*shape, *to.numbers(), *source.numbers()]
        self._accept(self._c.check_plan_block(self._plan, (ctypes.c_uint64 * 13)(*numbers)))

    def add_flat(self, dtype: torch.dtype, numel: int, bases: Sequence[int], at: int = 0) -> None:
        n = len(bases)
        self._accept(
            self._c.check_plan_flat(
                self._plan,
                DTYPES.index(dtype),
                ctypes.c_size_t(numel),
                ctypes.c_size_t(n),
                (ctypes.c_uint32 * n)(*bases),
                (ctypes.c_size_t * n)(*[at] * n),
            )
        )

    @property
    def n_parts(self) -> int:
        return self._c.check_plan_parts(self._plan)

    def _table(self, name: str) -> torch.Tensor:
        size = ctypes.c_size_t()
        memory = getattr(self._c, f"check_plan_{name}")(self._plan, ctypes.byref(size))
        content = ctypes.string_at(memory, size.value) if size.value else bytes(1)
        return torch.frombuffer(bytearray(content), dtype=torch.uint8).to(self._kernels.device)

    def seal(self, copies: int = 1) -> Plan:
        tables = [self._table(name) for name in ("runs", "stretches", "slots")]
        self._copies = [[table.clone() for table in tables] for _ in range(copies)]
        return self

    def _launch(self, tensors: Sequence[torch.Tensor | None]) -> tuple[ctypes.Structure, object]:
        addresses = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
        kept = (ctypes.c_uint64 * len(addresses))(*addresses)
        stream = 0
        if self._kernels.device.type == "cuda":
            stream = torch.cuda.current_stream().cuda_stream
        copy = self._copies[self._n_launches % len(self._copies)]
        self._n_launches += 1
        tables = [table.data_ptr() for table in copy]
        launch = _Launch(self._plan, *tables, ctypes.addressof(kept), stream)
        return launch, kept

    def move(self, tensors: Sequence[torch.Tensor | None]) -> None:
        launch, _kept = self._launch(tensors)
        self._kernels.check(self._c.check_move(self._kernels.table, ctypes.byref(launch)))

    def finish(self, tensors: Sequence[torch.Tensor], divisor: float, accumulate: bool) -> None:
        launch, _kept = self._launch(tensors)
        self._kernels.check(
            self._c.check_finish(
                self._kernels.table,
                ctypes.byref(launch),
                ctypes.c_double(divisor),
                int(accumulate),
            )
        )

    def sum_squares(self, tensors: Sequence[torch.Tensor], n_slots: int) -> torch.Tensor:
        device = self._kernels.device
        launch, _kept = self._launch(tensors)
        parts = torch.empty(max(self.n_parts, 1), dtype=torch.float64, device=device)
        sums = torch.empty(n_slots, dtype=torch.float64, device=device)
        self._kernels.check(
            self._c.check_sum_squares(
                self._kernels.table,
                ctypes.byref(launch),
                ctypes.c_void_p(parts.data_ptr()),
                ctypes.c_void_p(sums.data_ptr()),
            )
        )
        return sums

    def adam(self, tensors: Sequence[torch.Tensor], step: int, options: Sequence[float]) -> None:
        """options: lr, beta1, beta2, eps, weight_decay, decoupled."""
        launch, _kept = self._launch(tensors)
        self._kernels.check(
            self._c.check_adam(
                self._kernels.table,
                ctypes.byref(launch),
                ctypes.c_double(step),
                (ctypes.c_double * 6)(*options),
            )
        )

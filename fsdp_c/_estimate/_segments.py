"""A traced step: stretches between boundaries of units, with what each computes and keeps."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass
class Segment:
    """A stretch of a step between two boundaries of units or blocks."""

    phase: str  # "forward" or "backward"
    module: str  # dotted name; "" is the model itself
    flops: int = 0  # of matrix products and convolutions
    matrix_bytes: int = 0  # that those read and write
    other_bytes: int = 0  # that all other operations read and write
    n_ops: int = 0
    peak: int = 0  # bytes alive at most: activations and unsharded gradients, without parameters
    end: int = 0  # bytes alive at its end
    calls: int = 0  # how often the module's forward or backward begins with it


@dataclass(frozen=True)
class Trace:
    segments: list[Segment]
    kept: int  # bytes alive between forward and backward
    unreached: frozenset[str] = frozenset()  # parameters that want a gradient and get none

    @property
    def peak(self) -> int:
        return max((segment.peak for segment in self.segments), default=0)

    @property
    def flops(self) -> int:
        return sum(segment.flops for segment in self.segments)

    def calls(self, phase: str, module: str) -> int:
        """How often that module runs, or its gradients do."""
        return sum(s.calls for s in self.segments if (s.phase, s.module) == (phase, module))


@dataclass(frozen=True)
class Rules:
    """What happens to unsharded gradients: when a unit's are reduced, and when they are let go."""

    compute_dtype: torch.dtype | None = None  # of parameters and inputs while they compute
    keeps_gradients: bool = False  # unsharded, to the end of the step
    borrowed_bytes: int = 0  # a unit's gradients up to this size wait for the next unit's reduction
    on_cpu: bool = False  # by torch's operators for the CPU

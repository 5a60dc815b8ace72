"""Collectives on CPU tensors over the ranks of a process group."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from types import TracebackType

import torch
import torch.distributed as dist

from fsdp_c._comm._rendezvous import telling_of_ended
from fsdp_c._comm._transport import transport_for
from fsdp_c._native import _C


class Communicator:
    """Collectives on contiguous CPU tensors over the ranks of a process group.

    Creation, every method and the order of calls are collective. With shared memory, calls that
    differ between ranks raise RuntimeError on all of them before any tensor is written, and a rank
    that dies makes the others raise within a second; after such an error the communicator and its
    group's transport cannot be used any more. Sums are added in rank order in float32 (float64 for
    float64 tensors) and rounded once. Without shared memory the group's own collectives run.

    Calls block. They are for one thread at a time.

    Args:
        group: process group; default: the world.

    Raises:
        ValueError: a tensor is not on the CPU, not contiguous, or has the wrong size or dtype;
            nothing has been sent then, so the other ranks wait.
        RuntimeError: ranks disagree, or a rank is gone.
        TimeoutError: a rank did not come within the group's timeout.

    Examples:
        >>> with fsdp_c.Communicator() as comm:
        ...     whole = torch.empty(4 * world)
        ...     comm.all_gather(whole, torch.full((4,), float(rank)))
        ...     print(comm.transport, whole)
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._comm: _C.Comm | None = _C.Comm(transport=transport_for(group))

    @property
    def transport(self) -> str:
        """`"shm"`, `"rails"` or `"callback"`."""
        return self._open().transport.kind

    def all_gather(self, output: torch.Tensor, input: torch.Tensor) -> None:
        """`output` holds the inputs of all ranks one after another: n_ranks times the elements of
        `input`, same dtype. `input` may be this rank's part of `output`.

        Examples:
            >>> comm = fsdp_c.Communicator()
            >>> whole = torch.empty(2 * world)
            >>> comm.all_gather(whole, torch.ones(2))
        """
        self._collect("all_gather", output, input)

    def reduce_scatter(
        self, output: torch.Tensor, input: torch.Tensor, divisor: float = 1.0
    ) -> None:
        """`output` = sum over ranks of this rank's part of their `input`, divided by `divisor`.

        `input` has n_ranks times the elements of `output`, same dtype: floating or integer (those
        with divisor 1). `output` may be this rank's part of `input`.

        Examples:
            >>> comm = fsdp_c.Communicator()
            >>> part = torch.empty(2)
            >>> comm.reduce_scatter(part, torch.ones(2 * world), divisor=world)
        """
        self._collect("reduce_scatter", output, input, divisor)

    def all_reduce(self, tensor: torch.Tensor, divisor: float = 1.0) -> None:
        """`tensor` = sum of all ranks' `tensor` / `divisor`, in place; the same bits everywhere.

        Examples:
            >>> loss = torch.tensor([float(rank)])
            >>> fsdp_c.Communicator().all_reduce(loss, divisor=world)
        """
        self._collect("all_reduce", tensor, None, divisor)

    def broadcast(self, tensor: torch.Tensor, src: int) -> None:
        """`tensor` of every rank becomes that of rank `src` of the group.

        Examples:
            >>> seed = torch.randint(1000, (1,))
            >>> fsdp_c.Communicator().broadcast(seed, src=0)
        """
        self._collect("broadcast", tensor, None, src=src)

    def all_to_all(
        self, output: torch.Tensor, input: torch.Tensor, counts: Sequence[Sequence[int]]
    ) -> None:
        """Rank s sends ``counts[s][r]`` elements to rank r; all ranks pass the same table.

        `input` holds what this rank sends, to rank 0, 1, ..., one after another; `output` gets what
        it receives from rank 0, 1, ... Same dtype; they may not overlap.

        Examples:
            >>> counts = [[2] * world for _ in range(world)]
            >>> received = torch.empty(2 * world)
            >>> fsdp_c.Communicator().all_to_all(received, torch.ones(2 * world), counts)
        """
        self._open().all_to_all(output=output, input=input, counts=_flat(counts))

    def exchange(
        self,
        received: list[list[torch.Tensor]],
        sent: list[list[torch.Tensor]],
        counts: Sequence[Sequence[int]],
        itemsize: int,
    ) -> None:
        """The same between lists of tensors, one list for each rank, of any strides.

        The elements of ``sent[r]``, in the order of the list and of each tensor's indices, become
        those of ``received[this rank]`` on rank r. `counts` is in elements of `itemsize` bytes.

        Examples:
            >>> counts = [[2] * world for _ in range(world)]
            >>> received, sent = ([[torch.ones(2)] for _ in range(world)] for _ in range(2))
            >>> fsdp_c.Communicator().exchange(received, sent, counts, itemsize=4)
        """
        self._open().exchange(received=received, sent=sent, counts=_flat(counts), itemsize=itemsize)

    def all_agree(self, is_true: bool) -> bool:
        """Whether it is true on all ranks.

        Examples:
            >>> is_last = fsdp_c.Communicator().all_agree(bool(x.isfinite().all()))
        """
        return self._open().all_agree(is_true)

    def barrier(self) -> None:
        """Returns when all ranks have called it.

        Examples:
            >>> fsdp_c.Communicator().barrier()
        """
        self._open().barrier()

    def close(self) -> None:
        """Gives back the memory of this rank; local. Calling it again is fine.

        Examples:
            >>> comm = fsdp_c.Communicator()
            >>> comm.close()
        """
        self._comm = None

    def _collect(
        self,
        what: str,
        output: torch.Tensor,
        input: torch.Tensor | None,
        divisor: float = 1.0,
        src: int = 0,
    ) -> None:
        self._open().collect(what=what, output=output, input=input, divisor=divisor, src=src)

    def _open(self) -> _C.Comm:
        if self._comm is None:
            raise RuntimeError("this Communicator has been closed")
        return self._comm

    def __enter__(self) -> Communicator:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _flat(counts: Sequence[Sequence[int]]) -> list[int]:
    if len({len(row) for row in counts}) > 1:
        raise ValueError("counts must be rows of one length")
    return [n for row in counts for n in row]


_communicators: weakref.WeakKeyDictionary[dist.ProcessGroup, Communicator] = (
    weakref.WeakKeyDictionary()
)


def communicator_for(group: dist.ProcessGroup) -> Communicator:
    """The package's own communicator over the group; collective on first use."""
    if group not in _communicators:
        with telling_of_ended():
            _communicators[group] = Communicator(group)
    return _communicators[group]

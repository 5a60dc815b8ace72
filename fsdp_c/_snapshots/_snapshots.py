"""Snapshots: what a run needs to go on is copied aside after each step, beside the next one."""

from __future__ import annotations

import operator
import os
from collections.abc import MutableMapping, Sequence
from types import TracebackType
from typing import Any

from torch import nn

from fsdp_c._snapshots import _contents, _files, _meeting, _peers, _resuming, _taking


class Snapshots:
    """Keeps copies of a run in memory that outlives its processes, so that it goes on from there.

    ```python
    snapshots = fsdp_c.Snapshots(model, optimizer, extra={"scheduler": scheduler})
    start = snapshots.resume()  # steps done; 0 where there is nothing to go on from
    for step in range(start, n_steps):
        ...
        optimizer.step()
        optimizer.zero_grad()
        snapshots.take(step + 1)
    snapshots.close()
    ```

    A rank that is killed at any moment is started again with the others by ``torchrun
    --max-restarts``; the run ends with the bits that it would have had. Kept are each rank's
    parameters and buffers, of optimizers state and options, the states of the random number
    generators of Python, NumPy and torch, and `extra`; not gradients. They are kept twice, so this
    takes twice the memory of these once more, in files of mode 0600 in ``/dev/shm`` that this user
    alone can read.

    ``take`` copies buffers and small tensors at once; parameters and state are read beside the next
    forward and backward, and the optimizers given wait until that is over before they step. What
    else writes to parameters between ``take`` and the next ``step()``, except by ``.data``, is
    noticed: the snapshot does not count, a warning names the tensor, and it is copied in ``take``
    from then on.
    Tensors on an accelerator are copied on a stream of its own, into pinned memory that takes as
    much as they once more; no GPU has run this yet.

    Examples:
        >>> snapshots = fsdp_c.Snapshots(model, optimizer, extra={"scheduler": scheduler})
        >>> for step in range(snapshots.resume(), n_steps):
        ...     model(batch_of(step)).square().mean().backward()
        ...     optimizer.step()
        ...     optimizer.zero_grad()
        ...     snapshots.take(step + 1)
        >>> snapshots.close()
    """

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        optimizer: Any | Sequence[Any] | None = None,
        *,
        every: int = 1,
        extra: MutableMapping[str, Any] | None = None,
        folder: str | os.PathLike[str] | None = None,
        name: str = "main",
        copies: int = 1,
    ) -> None:
        """Local; the ranks meet in ``resume``.

        Args:
            model: a module, sharded or not, or several (a copy for EMA, ...).
            optimizer: one or several; torch's, or anything with ``state_dict`` and
                ``load_state_dict``: with one that is not torch's ``take`` copies all at once.
            every: snapshots are taken after each so many steps, at least 1.
            extra: by name, objects with ``state_dict`` and ``load_state_dict`` (schedulers, a
                GradScaler, the position in the data), torch.Generators, or values that pickle
                takes, which ``resume`` replaces in this dict.
            folder: where the files go in place of ``/dev/shm``. It names the run: any process with
                the same folder, world size and model goes on from them. On a disk they outlive the
                host only as far as it was written back.
            name: tells several Snapshots of a run apart.
            copies: 2 keeps each rank's snapshots in the memory of another host, too, so that a run
                goes on after a host has died. They are sent beside the next step, which takes the
                network that time and each rank's host as much memory again.

        Raises:
            TypeError, ValueError: arguments that are none of these.
        """
        models, optimizers = _contents.models_of(model), _contents.optimizers_of(optimizer)
        _contents.check_extra(extra)
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ValueError(f"Snapshots: every={every!r}: one is taken each 1 or more steps")
        if isinstance(copies, bool) or copies not in (1, 2):
            raise ValueError(f"Snapshots: copies={copies!r}: 1, or 2 for one on another host, too")
        _files.check_name(name)
        self.extra: MutableMapping[str, Any] = {} if extra is None else extra
        self._contents = _contents.Contents(models, optimizers, self.extra)
        self._every = every
        self._place = _resuming.Place(name, *_files.folder_and_stem(folder, name), copies)
        self._resuming: _resuming.Resuming | None = _resuming.Resuming(
            self._contents, _meeting.Meeting(), self._place
        )
        self._taking: _taking.Taking | None = None  # between resume() and the end
        self._is_closed = False
        self._pid = os.getpid()

    def resume(self) -> int:
        """Loads the newest step that every rank has whole; returns it, or 0 without one.

        Once, after model and optimizers are built and before the first step. Files of runs whose
        launcher is gone are removed. Collective.

        Raises:
            RuntimeError: the snapshots are of another world size, model, optimizer or extra,
                another process writes them, or another rank has failed.
            ValueError: something that cannot be kept, by its name.

        Examples:
            >>> snapshots = fsdp_c.Snapshots(model, optimizer, folder=folder)
            >>> first = snapshots.resume()
            >>> snapshots.close()
        """
        if self._resuming is None:
            raise RuntimeError("Snapshots.resume() is called once, before the first step")
        step, self._taking = self._resuming.run()
        self._resuming = None
        return step

    def take(self, step: int) -> None:
        """After an optimizer's step: keeps the state after `step` steps, each `every`-th time.

        All ranks call it after the same steps. Where there is no room the run goes on, with one
        warning, and what was kept stays.

        Raises:
            ValueError: something that cannot be kept, by its name.
            RuntimeError, TimeoutError: another rank has ended, takes other steps, or does not come.

        Examples:
            >>> snapshots = fsdp_c.Snapshots(model, optimizer, folder=folder)
            >>> step = snapshots.resume()
            >>> optimizer.step()
            >>> snapshots.take(step + 1)
            >>> snapshots.close()
        """
        if self._is_closed or self._resuming is not None:
            how = "after close()" if self._is_closed else "before resume()"
            raise RuntimeError(f"Snapshots.take() {how}")
        if isinstance(step, bool) or not hasattr(step, "__index__") or step < 0:
            raise ValueError(f"Snapshots.take: step={step!r} is no number of steps done")
        number = operator.index(step)  # one of NumPy's is one, too
        if self._taking is not None and number % self._every == 0 and self._pid == os.getpid():
            self._taking.take(number)

    def finish(self) -> None:
        """Returns when the last snapshot is whole, and nothing is read any more. Local.

        Before parameters are written in a way of your own; the optimizers given do it themselves.

        Examples:
            >>> snapshots = fsdp_c.Snapshots(model, optimizer, folder=folder)
            >>> snapshots.take(snapshots.resume() + 1)
            >>> snapshots.finish()
            >>> snapshots.close()
        """
        if self._taking is not None:
            self._taking.finish()

    def close(self) -> None:
        """The run has ended well: when all ranks have said so, the files of the host are removed.

        A process that exits with status 0 does the same. Call it last, after what the run leaves
        behind is saved: a rank that is killed later starts from the beginning. Local.

        Examples:
            >>> snapshots = fsdp_c.Snapshots(model, optimizer, folder=folder)
            >>> snapshots.resume()
            >>> snapshots.close()
        """
        self._end(_peers.CLOSED)

    def _end(self, how: int) -> None:
        taking, self._taking = self._taking, None
        self._is_closed = True
        if taking is not None:
            taking.end(how)
            _resuming.let_go(taking.slots)

    def __enter__(self) -> Snapshots:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """As ``close``; after an exception the files stay, for the next start."""
        self._end(_peers.CLOSED if error is None else _peers.BY_EXCEPTION)

"""Snapshots: what a run needs to go on is copied aside after each step, beside the next one."""

from __future__ import annotations

import atexit
import os
import socket
import threading
import weakref
from collections import Counter
from collections.abc import MutableMapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import Tensor, nn, optim
from torch.distributed.tensor import DTensor

from fsdp_c._comm import _hosts, _rendezvous
from fsdp_c._fully_shard import _fsdp_module
from fsdp_c._native import _C
from fsdp_c._snapshots import (
    _contents,
    _copies,
    _fetch,
    _files,
    _meeting,
    _parts,
    _peers,
    _run,
)
from fsdp_c._window._open import name_of_run

_open: weakref.WeakSet[Snapshots] = weakref.WeakSet()
_in_use: set[Path] = set()
_n_resumes: Counter[str] = Counter()  # by name: what is told in the store is of one of them


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
    forward, and the optimizers given wait until that is over before they step. What else writes to
    parameters between ``take`` and the next ``step()``, except by ``.data``, is noticed: the
    snapshot does not count, a warning names the tensor, and it is copied in ``take`` from then on.
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
        models = [model] if isinstance(model, nn.Module) else list(model)
        is_one = isinstance(optimizer, optim.Optimizer) or hasattr(optimizer, "state_dict")
        optimizers = [optimizer] if is_one else list(optimizer or ())
        _contents.check(models, optimizers, extra)
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ValueError(f"Snapshots: every={every!r}: one is taken each 1 or more steps")
        if isinstance(copies, bool) or copies not in (1, 2):
            raise ValueError(f"Snapshots: copies={copies!r}: 1, or 2 for one on another host, too")
        _files.check_name(name)
        self.extra: MutableMapping[str, Any] = {} if extra is None else extra
        self._contents = _contents.Contents(models, optimizers, self.extra)
        self._every = every
        self._name = name
        self._n_copies = copies
        self._folder, self._stem = _files.folder_and_stem(folder, name)
        self._pid = os.getpid()
        self._key = name  # among what this process has resumed
        self._meeting = _meeting.Meeting()
        self._rank, self._world = self._meeting.rank, self._meeting.world
        self._slots: list[_files.Slot] = []
        self._pages: Any = None  # _C.SnapshotRanks
        self._peers: _peers.Peers | None = None
        self._copier: Any = None  # _C.SnapshotCopier
        self._copies: _copies.Copies | None = None  # on another host
        self._group: Any = None  # a process group for these, once they are needed
        self._state = "new"  # then open, off or closed
        self._number = 0  # of snapshots since resume()
        self._sequence = 0  # of those of the run
        self._kept = 1  # the slot that all ranks have whole, or that is not the next one
        self._pending: list[Tensor] | None = None  # that the copy under way reads
        self._settling = threading.RLock()  # a thread that steps waits for another one's wait
        self._written: dict[int, Tensor] = {}  # by id, what is written between updates
        self._has_warned = self._has_warned_of_copies = False
        self._handles: list[Any] = []

    # ---- going on ----

    def resume(self) -> int:
        """Loads the newest step that every rank has whole; returns it, or 0 without one.

        Once, after model and optimizers are built and before the first step. Files of runs whose
        launcher is gone are removed. Collective.

        Raises:
            RuntimeError: the snapshots are of another world size, model or optimizer, another
                process writes them, or another rank has failed.
            ValueError: something that cannot be kept, by its name.

        Examples:
            >>> snapshots = fsdp_c.Snapshots(model, optimizer, folder=folder)
            >>> first = snapshots.resume()
            >>> snapshots.close()
        """
        if self._state != "new":
            raise RuntimeError("Snapshots.resume() is called once, before the first step")
        _n_resumes[self._name] += 1
        self._key = f"{self._name}/{_n_resumes[self._name]}"
        self._meeting.open()
        told: _meeting.Answer = {"error": "", "unusable": "", "wholes": []}
        error: Exception | None = None
        try:
            told |= self._look()
        except _files.Unusable as reason:
            told["unusable"] = str(reason)
        except Exception as fault:
            error = fault
            told["error"] = self._meeting.told(error)
        answers = self._meeting.tell("Snapshots.resume", told)
        try:
            _meeting.raise_first(answers, error)
            if unusable := [answer["unusable"] for answer in answers if answer["unusable"]]:
                self._switch_off(unusable[0])
                return 0
            return self._go_on(answers)
        except BaseException:
            self._let_go()
            raise

    def _look(self) -> dict[str, Any]:
        """What this rank has; its files are there afterwards."""
        self._contents.pack(self._written)  # what cannot be kept is an error now
        if self._folder == _files.MEMORY:
            _files.remove_left_overs()
        elif not self._folder.is_dir():
            self._folder.mkdir(parents=True, exist_ok=True)
        paths = list(_files.paths(self._folder, self._stem, self._rank))
        if paths[0] in _in_use:
            raise RuntimeError(
                f"resume: there are Snapshots called {self._name!r} already: give these another"
                " name="
            )
        wholes = []
        for path in paths:
            slot = _files.Slot(path)
            self._slots.append(slot)
            self._check_owner(slot)
            slot.set_owner(self._owner())  # now: another process may come before this one goes on
            facts = slot.facts()
            if facts is not None and slot.is_intact():
                wholes.append([facts["sequence"], facts["step"], len(self._slots) - 1])
            elif facts is not None:
                _fsdp_module.warn_user(
                    f"Snapshots: {path} is damaged: its bytes are not those of step"
                    f" {facts['step']} that were written. An older snapshot is taken, if there is"
                    " one"
                )
        _in_use.add(paths[0])
        return {
            "wholes": wholes,
            "paths": [str(path) for path in paths],
            "page": self._slots[0].identity,
            "process": _rendezvous.this_process(),
            "host": socket.gethostname(),
            "updates": self._n_updating(),
            "copies": self._n_copies,
            "stem": [str(self._folder), self._stem],
            "lying": _files.lying(self._folder, self._stem, besides=self._rank),
        }

    def _owner(self, of: int | None = None) -> _files.Owner:
        """`of`: the rank whose snapshots the file has; default: this one."""
        return _files.Owner(
            run=_run.script(),
            launcher=_run.launcher(),
            process=_rendezvous.this_process(),
            name=self._name,
            rank=self._rank if of is None else of,
            world=self._world,
            shown=name_of_run(),
        )

    def _check_owner(self, slot: _files.Slot) -> None:
        owner = slot.owner()
        if owner is not None and slot.facts() is not None and owner.world != self._world:
            raise RuntimeError(
                f"resume: {slot.path} is of {owner.world} ranks, and this run has {self._world}."
                " Snapshots go on with as many ranks as took them (fsdp_c.load_shards loads dumps"
                " at any number). Start as many, or remove them: `python -m fsdp_c snapshots"
                " --remove`"
            )
        if (process := _files.in_use_by(owner)) is not None:
            raise RuntimeError(
                f"resume: process {process} writes {slot.path}: another run with this folder, or"
                " the same command from the same shell. Give one of them another name="
            )

    def _go_on(self, answers: Sequence[_meeting.Answer]) -> int:
        _check_copies(answers)
        mine = {(sequence, step): slot for sequence, step, slot in answers[self._rank]["wholes"]}
        shared = [{(a, b) for a, b, _ in answer["wholes"]} for answer in answers]
        common = self._fetch(answers, shared, mine)
        slot = mine.get(common)
        opened: _contents.Opened | None = None
        error: Exception | None = None
        try:
            opened = self._open_snapshot(slot)
        except Exception as fault:
            error = fault
        self._meeting.agree("fitting snapshots", error)
        try:
            if opened is not None:
                self._contents.install(opened)
        except Exception as fault:
            error = fault
        self._meeting.agree("loading snapshots", error)
        self._start_from(slot, answers, common)
        self._sequence = _before_first(answers, common)
        if slot is None and any(shared) and self._rank == 0:
            had = "; ".join(
                f"rank {rank}: {', '.join(str(step) for _, step in sorted(wholes)) or 'none'}"
                for rank, wholes in enumerate(shared)
            )
            _fsdp_module.warn_user(
                f"Snapshots: there is no step that all ranks have whole ({had}), so that"
                " resume() returns 0: a rank was killed before its first one, or runs on another"
                " host now"
            )
        return common[1]

    def _fetch(
        self,
        answers: Sequence[_meeting.Answer],
        own: Sequence[set[_fetch.Step]],
        mine: dict[_fetch.Step, int],
    ) -> _fetch.Step:
        """The step to go on from. Who lacks it is given it by another host; adds it to `mine`."""
        lying = [[_files.Lying(*file) for file in answer["lying"]] for answer in answers]
        while True:
            common, needs = _fetch.plan(own, lying)
            if not needs:
                return common
            bad: list[str] = []
            error: Exception | None = None
            try:
                files = [file for holder, file in needs.values() if holder == self._rank]
                bad = [file.path for file in files if not _fetch.is_readable(file)]
                if self._rank in needs:
                    n_bytes = needs[self._rank][1].n_bytes
                    self._slots[0].reserve(_C.SNAPSHOT_PAGE + n_bytes)
            except Exception as fault:
                error = fault
            told = {"error": self._meeting.told(error), "bad": bad}
            found = self._meeting.tell("snapshots of other hosts", told)
            _meeting.raise_first(found, error)
            if not any(answer["bad"] for answer in found):
                break
            lying = [
                [file for file in files if file.path not in answer["bad"]]
                for files, answer in zip(lying, found, strict=True)
            ]
        self._group = self._meeting.bytes_group()
        try:
            _fetch.fetch(self._rank, needs, self._group, self._slots[0])
        except Exception as fault:
            error = fault
        self._meeting.agree("snapshots from other hosts", error)
        if self._rank in needs:
            mine[common] = 0
        return common

    def _open_snapshot(self, slot: int | None) -> _contents.Opened | None:
        if slot is None:
            return None
        data, index = self._slots[slot].data()
        return self._contents.look_at(index, data)

    def _start_from(
        self,
        slot: int | None,
        answers: Sequence[_meeting.Answer],
        common: _fetch.Step,
    ) -> None:
        hosts = self._meeting.meet_hosts(answers)
        has_copies = self._n_copies > 1 and len(hosts.names) > 1
        to = _copies.keepers(hosts) if has_copies else [-1] * self._world
        kept: list[_copies.Kept] = []
        error: Exception | None = None
        try:
            self._keep_slot(slot)
            self._open_pages(answers, to)
            kept = self._open_kept(to, common)
            self._copier = _C.SnapshotCopier()
        except Exception as fault:
            error = fault
        self._meeting.agree("starting snapshots", error)
        if has_copies:
            self._open_copies(hosts, kept)
        elif self._n_copies > 1 and self._rank == 0:
            _fsdp_module.warn_user(
                "Snapshots: copies=2, and all ranks are on one host: a second copy would die with"
                " it, and none is kept"
            )
        for optimizer in self._contents.optimizers:
            if _parts.calls_hooks(optimizer):
                self._handles.append(optimizer.register_step_pre_hook(self._before_step))
                self._handles.append(
                    optimizer.register_load_state_dict_pre_hook(self._before_update)
                )
        _open.add(self)
        self._state = "open"

    def _keep_slot(self, slot: int | None) -> None:
        if slot is not None:
            self._kept = slot
        for number, one in enumerate(self._slots):
            if number != slot:
                one.clear()
            one.set_owner(self._owner())

    def _open_pages(self, answers: Sequence[_meeting.Answer], keepers: Sequence[int]) -> None:
        """`keepers`: of each rank, who keeps its copies."""
        local = _meeting.on_this_host(answers, self._rank)
        files = [path for rank in local for path in answers[rank]["paths"]]
        # What ranks that had other numbers have left here is nobody's at the end.
        files += [_files.Lying(*file).path for rank in local for file in answers[rank]["lying"]]
        for owner, keeper in enumerate(keepers):
            if keeper in local:
                folder, stem = answers[keeper]["stem"]
                files += map(str, _files.paths(Path(folder), stem, owner, is_copy=True))
        self._pages = _C.SnapshotRanks(
            pages=[answers[rank]["paths"][0] for rank in local],
            own=local.index(self._rank),
            files=list(dict.fromkeys(files)),
        )
        for word in range(_peers.N_WORDS):
            self._pages.set_word(word=word, value=0)
        self._peers = _peers.Peers(
            name=self._key,
            rank=self._rank,
            pages=self._pages,
            local=local,
            processes=[answer["process"] for answer in answers],
            counts_updates=self._counts_updates(answers),
            store=self._meeting.store,
            timeout_s=self._meeting.timeout_s,
            keeper=keepers[self._rank] if keepers[self._rank] >= 0 else None,
        )

    def _open_kept(self, keepers: Sequence[int], common: _fetch.Step) -> list[_copies.Kept]:
        """Of each rank whose copies this one keeps."""
        found = []
        for owner, keeper in enumerate(keepers):
            if keeper == self._rank:
                paths = _files.paths(self._folder, self._stem, owner, is_copy=True)
                try:
                    kept = _copies.Kept(owner, list(map(_files.Slot, paths)))
                except _files.Unusable as reason:
                    kept = _copies.Kept(owner, [], str(reason))
                for slot in kept.slots:
                    facts = slot.facts()
                    if facts is not None and (facts["sequence"], facts["step"]) != common:
                        slot.clear()
                    slot.set_owner(self._owner(owner))
                found.append(kept)
        return found

    def _open_copies(self, hosts: _hosts.Hosts, kept: Sequence[_copies.Kept]) -> None:
        """Collective. What is gone on from is sent first."""
        assert self._peers is not None and self._meeting.store is not None
        self._copies = _copies.Copies(
            rank=self._rank,
            hosts=hosts,
            group=self._group or self._meeting.bytes_group(),
            store=self._meeting.store,
            prefix=f"fsdp_c/snapshots/{self._key}",
            kept=kept,
            owner_of=self._owner,
            tell=self._peers.tell,
        )
        mine = self._slots[self._kept]
        if (facts := mine.facts()) is not None:
            n_bytes = facts["data_bytes"] + facts["index_bytes"]
            self._copies.begin(0, mine, facts["sequence"], n_bytes)
            self._copies.settle(_peers.WHOLE)

    def _switch_off(self, reason: str) -> None:
        for slot in self._slots:
            if slot.facts() is None:
                slot.path.unlink(missing_ok=True)
        self._let_go()
        self._state = "off"
        _fsdp_module.warn_user(f"Snapshots: none are taken, and the run goes on: {reason}")

    # ---- taking ----

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
        if self._state == "off":
            return
        if self._state != "open":
            how = "after close()" if self._state == "closed" else "before resume()"
            raise RuntimeError(f"Snapshots.take() {how}")
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            raise ValueError(f"Snapshots.take: step={step!r} is no number of steps done")
        if step % self._every == 0 and self._pid == os.getpid():
            self._take(step)

    def _take(self, step: int) -> None:
        assert self._peers is not None
        self.finish()
        packed = self._contents.pack(self._written)
        self._peers.come(self._number + 1, step)
        if self._number > 0 and self._peers.are_whole(self._number):
            self._kept = 1 - self._kept
        self._number += 1
        self._sequence += 1
        slot = self._slots[1 - self._kept]
        try:
            slot.reserve(_C.snapshot_room(tensors=packed.locals, index_bytes=len(packed.index)))
        except _files.Unusable as reason:
            self._tell_of_none()
            self._warn_of_room(str(reason))
            return
        try:
            self._copier.start(
                locals=packed.locals,
                sources=packed.sources,
                shown=packed.shown,
                now=packed.now,
                watched=packed.watched,
                index=packed.index,
                file=slot.memory,
                sequence=self._sequence,
                step=step,
            )
            self._pending = packed.waiting()
        except BaseException:  # an interrupt may come when it has begun
            self._copier.finish()
            slot.clear()
            self._tell_of_none()
            raise
        if self._copies is not None:
            n_bytes = _C.snapshot_room(tensors=packed.locals, index_bytes=len(packed.index))
            kept = self._slots[self._kept].facts()
            stays = kept["sequence"] if kept is not None else 0
            n_bytes -= _C.SNAPSHOT_PAGE
            self._copies.begin(self._number, slot, self._sequence, n_bytes, stays)
            self._warn_of_copies(self._copies)

    def _tell_of_none(self) -> None:
        """This rank takes no snapshot of this number."""
        assert self._peers is not None
        self._peers.tell(self._number, _peers.FAILED)
        if self._copies is not None:
            self._copies.skip(self._number)

    def _warn_of_copies(self, copies: _copies.Copies) -> None:
        if copies.problem and not self._has_warned_of_copies:
            self._has_warned_of_copies = True
            _fsdp_module.warn_user(
                f"Snapshots: rank {self._rank} has no second copy on host {copies.host}, and the"
                f" run goes on: {copies.problem}"
            )

    def _warn_of_room(self, reason: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            _fsdp_module.warn_user(
                f"Snapshots: rank {self._rank} took none, and the run goes on: {reason}. It tries"
                " again after each step, without another word"
            )

    def finish(self) -> None:
        """Returns when the last snapshot is whole, and nothing is read any more. Local.

        Before parameters are written in a way of your own; the optimizers given do it themselves.

        Examples:
            >>> snapshots = fsdp_c.Snapshots(model, optimizer, folder=folder)
            >>> snapshots.take(snapshots.resume() + 1)
            >>> snapshots.finish()
            >>> snapshots.close()
        """
        if self._peers is None or (outcome := self._settle()) is None:
            return
        if self._copies is not None:
            self._copies.settle(outcome)
        else:
            self._peers.tell(self._number, outcome)

    def _settle(self) -> int | None:
        """What became of the snapshot under way; None: there was none."""
        if self._pid != os.getpid():
            return None
        with self._settling:
            pending, self._pending = self._pending, None
            if pending is None:
                return None
            changed = [pending[place] for place in self._copier.finish()]
        for tensor in changed:
            self._written[id(tensor)] = tensor
        if changed:
            _fsdp_module.warn_user(
                f"Snapshots: {self._name_of(changed[0])} was written between take() and the next"
                " step() of the optimizers given: that snapshot does not count, and it is copied"
                " in take() from now on. Call finish() before such a write, or take() after it"
            )
        return _peers.FAILED if changed else _peers.WHOLE

    def _before_update(self, *_: Any) -> None:
        self.finish()

    def _before_step(self, *_: Any) -> None:
        self._before_update()
        if self._peers is not None and self._pid == os.getpid():
            self._peers.count_update()

    def _counts_updates(self, answers: Sequence[_meeting.Answer]) -> bool:
        """Whether ranks make equally many updates, however far they are: the shards' owners do."""
        return all(answer["updates"] == answers[0]["updates"] > 0 for answer in answers)

    def _n_updating(self) -> int:
        """Optimizers whose steps are counted; 0: they need not step alike."""
        tensors = [p for model in self._contents.models for p in model.parameters()]
        if not any(isinstance(p, DTensor) for p in tensors):
            return 0
        return sum(map(_parts.calls_hooks, self._contents.optimizers))

    def _name_of(self, tensor: Tensor) -> str:
        for model in self._contents.models:
            for name, one in _parts.tensors_of(model).items():
                if one is tensor:
                    return f"'{name}'"
        return f"optimizer state of shape {tuple(tensor.shape)}"

    # ---- the end ----

    def close(self) -> None:
        """The run has ended well: when all ranks have said so, the files of the host are removed.

        A process that exits with status 0 does the same. Call it last, after what the run leaves
        behind is saved: a rank that is killed later starts from the beginning. Local.

        Examples:
            >>> snapshots = fsdp_c.Snapshots(model, optimizer, folder=folder)
            >>> snapshots.resume()
            >>> snapshots.close()
        """
        if self._state == "open" and self._pid == os.getpid():
            self._settle()  # who needs to know waits for a next one, which this rank does not take
            if self._peers is not None:
                self._peers.leave(_peers.CLOSED)
            self._pages.end()
        self._let_go()
        self._state = "closed"

    def _let_go(self) -> None:
        """The files stay."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self._copies is not None:
            self._copies.close()
            self._copies = None
        if self._pages is not None:
            self._pages.close()
            self._pages = None
        if self._slots:
            _in_use.discard(self._slots[0].path)
        for slot in self._slots:
            slot.close()
        self._slots.clear()
        self._copier = None

    def __enter__(self) -> Snapshots:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """As ``close``; after an exception the files stay, for the next start."""
        if error is None:
            self.close()
        elif self._state == "open":
            self._settle()
            if self._peers is not None:
                self._peers.leave(_peers.BY_EXCEPTION)
            self._let_go()
            self._state = "closed"


def _before_first(answers: Sequence[_meeting.Answer], common: _fetch.Step) -> int:
    """The sequence that this life of the run begins behind: in the upper half the life's number.

    Files of an earlier life may lie where nobody writes over them, of steps that are made again.
    """
    found = [entry[0] for answer in answers for entry in answer["wholes"]]
    found += [entry[1] for answer in answers for entry in answer["lying"]]
    life = 1 + max((sequence >> 32 for sequence in found), default=0)
    return life << 32 | common[0] & 0xFFFFFFFF


def _check_copies(answers: Sequence[_meeting.Answer]) -> None:
    for rank, answer in enumerate(answers):
        if answer["copies"] != answers[0]["copies"]:
            raise ValueError(
                f"Snapshots: copies={answers[0]['copies']} on rank 0 and {answer['copies']} on rank"
                f" {rank}: give all ranks the same"
            )


@atexit.register
def _finish_all() -> None:
    """An exception ends a process while its last snapshot is copied: that one counts, too."""
    for snapshots in list(_open):
        if snapshots._state == "open":
            snapshots._settle()
            if snapshots._copies is not None:  # no thread may be in the process group then
                snapshots._copies.close()

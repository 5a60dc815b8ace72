"""Going on from snapshots: what each rank has, which step all have, and who gives it to whom."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

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
    _taking,
)
from fsdp_c._window._open import name_of_run

_in_use: set[Path] = set()
_n_resumes: Counter[str] = Counter()  # by name: what is told in the store is of one of them


class Place(NamedTuple):
    """Where a run's snapshots are kept."""

    name: str  # of these among the run's
    folder: Path
    stem: str  # how the names of files begin
    n_copies: int


class Resuming:
    """This rank's part; what it opens is `taking`'s in the end, or closed."""

    def __init__(
        self, contents: _contents.Contents, meeting: _meeting.Meeting, place: Place
    ) -> None:
        self._contents = contents
        self._meeting = meeting
        self._rank, self._world = meeting.rank, meeting.world
        self._place = place
        self._key = place.name  # among what this process has resumed
        self._slots: list[_files.Slot] = []
        self._group: Any = None  # a process group for bytes, once one is needed

    def run(self) -> tuple[int, _taking.Taking | None]:
        """The step to go on from, and what takes the next ones; None: there is no room for any.

        Collective; raises as `Snapshots.resume` says.
        """
        _n_resumes[self._place.name] += 1
        self._key = f"{self._place.name}/{_n_resumes[self._place.name]}"
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
                self._give_up(unusable[0])
                return 0, None
            return self._go_on(answers)
        except BaseException:
            self._let_go()
            raise

    def _give_up(self, reason: str) -> None:
        for slot in self._slots:
            if slot.facts() is None:
                slot.path.unlink(missing_ok=True)
        self._let_go()
        _fsdp_module.warn_user(f"Snapshots: none are taken, and the run goes on: {reason}")

    def _let_go(self) -> None:
        """The files stay."""
        let_go(self._slots)

    def _look(self) -> dict[str, Any]:
        """What this rank has; its files are there afterwards."""
        self._contents.pack({})  # what cannot be kept is an error now
        if self._place.folder == _files.MEMORY:
            _files.remove_left_overs()
        elif not self._place.folder.is_dir():
            self._place.folder.mkdir(parents=True, exist_ok=True)
        paths = list(_files.paths(self._place.folder, self._place.stem, self._rank))
        if paths[0] in _in_use:
            raise RuntimeError(
                f"resume: there are Snapshots called {self._place.name!r} already: give these"
                " another name="
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
            "updates": _n_updating(self._contents),
            "copies": self._place.n_copies,
            "stem": [str(self._place.folder), self._place.stem],
            "lying": _files.lying(self._place.folder, self._place.stem, besides=self._rank),
        }

    def _owner(self, of: int | None = None) -> _files.Owner:
        """`of`: the rank whose snapshots the file has; default: this one."""
        return _files.Owner(
            run=_run.script(),
            launcher=_run.launcher(),
            process=_rendezvous.this_process(),
            name=self._place.name,
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

    def _go_on(self, answers: Sequence[_meeting.Answer]) -> tuple[int, _taking.Taking]:
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
        taking = self._start_from(slot, answers, common)
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
        return common[1], taking

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
    ) -> _taking.Taking:
        hosts = self._meeting.meet_hosts(answers)
        has_copies = self._place.n_copies > 1 and len(hosts.names) > 1
        to = _copies.keepers(hosts) if has_copies else [-1] * self._world
        taking: _taking.Taking | None = None
        kept: list[_copies.Kept] = []
        error: Exception | None = None
        try:
            self._clear_besides(slot)
            pages = self._open_pages(answers, to)
            kept = self._open_kept(to, common)
            peers = self._meet_peers(answers, pages, to)
            sequence = _before_first(answers, common)
            taking = _taking.Taking(self._contents, self._slots, slot, pages, peers, sequence)
        except Exception as fault:
            error = fault
        self._meeting.agree("starting snapshots", error)
        assert taking is not None
        if has_copies:
            taking.copy_to(self._open_copies(hosts, kept, taking.tell))
        elif self._place.n_copies > 1 and self._rank == 0:
            _fsdp_module.warn_user(
                "Snapshots: copies=2, and all ranks are on one host: a second copy would die with"
                " it, and none is kept"
            )
        taking.begin()
        return taking

    def _clear_besides(self, slot: int | None) -> None:
        for number, one in enumerate(self._slots):
            if number != slot:
                one.clear()
            one.set_owner(self._owner())

    def _open_pages(self, answers: Sequence[_meeting.Answer], keepers: Sequence[int]) -> Any:
        """`keepers`: of each rank, who keeps its copies."""
        local = _meeting.on_this_host(answers, self._rank)
        files = [path for rank in local for path in answers[rank]["paths"]]
        # What ranks that had other numbers have left here is nobody's at the end.
        files += [_files.Lying(*file).path for rank in local for file in answers[rank]["lying"]]
        for owner, keeper in enumerate(keepers):
            if keeper in local:
                folder, stem = answers[keeper]["stem"]
                files += map(str, _files.paths(Path(folder), stem, owner, is_copy=True))
        pages = _C.SnapshotRanks(
            pages=[answers[rank]["paths"][0] for rank in local],
            own=local.index(self._rank),
            files=list(dict.fromkeys(files)),
        )
        for word in range(_peers.N_WORDS):
            pages.set_word(word=word, value=0)
        return pages

    def _meet_peers(
        self, answers: Sequence[_meeting.Answer], pages: Any, keepers: Sequence[int]
    ) -> _peers.Peers:
        return _peers.Peers(
            name=self._key,
            rank=self._rank,
            pages=pages,
            local=_meeting.on_this_host(answers, self._rank),
            processes=[answer["process"] for answer in answers],
            counts_updates=_counts_updates(answers),
            store=self._meeting.store,
            timeout_s=self._meeting.timeout_s,
            keeper=keepers[self._rank] if keepers[self._rank] >= 0 else None,
        )

    def _open_kept(self, keepers: Sequence[int], common: _fetch.Step) -> list[_copies.Kept]:
        """Of each rank whose copies this one keeps."""
        found = []
        for owner, keeper in enumerate(keepers):
            if keeper == self._rank:
                paths = _files.paths(self._place.folder, self._place.stem, owner, is_copy=True)
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

    def _open_copies(
        self,
        hosts: _hosts.Hosts,
        kept: Sequence[_copies.Kept],
        tell: Callable[[int, int], None],
    ) -> _copies.Copies:
        """Collective."""
        assert self._meeting.store is not None
        return _copies.Copies(
            rank=self._rank,
            hosts=hosts,
            group=self._group or self._meeting.bytes_group(),
            store=self._meeting.store,
            prefix=f"fsdp_c/snapshots/{self._key}",
            kept=kept,
            owner_of=self._owner,
            tell=tell,
        )


def let_go(slots: list[_files.Slot]) -> None:
    """Closes a rank's files, which stay; others may open them."""
    if slots:
        _in_use.discard(slots[0].path)
    for slot in slots:
        slot.close()
    slots.clear()


def _counts_updates(answers: Sequence[_meeting.Answer]) -> bool:
    """Whether ranks make equally many updates, however far they are: the shards' owners do."""
    return all(answer["updates"] == answers[0]["updates"] > 0 for answer in answers)


def _n_updating(contents: _contents.Contents) -> int:
    """Optimizers whose steps are counted; 0: they need not step alike."""
    tensors = [p for model in contents.models for p in model.parameters()]
    if not any(isinstance(p, DTensor) for p in tensors):
        return 0
    return sum(map(_parts.calls_hooks, contents.optimizers))


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

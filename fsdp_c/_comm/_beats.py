"""Hosts that fall silent: who waits for one says so, and gives up in the end.

A connection to a host that has lost its power or its network does not break: the process group
would wait for its timeout. Each rank leaves a sign of life in the group's store every second. A
rank that waits for another host looks for the signs of its ranks. Beside them stands which phases a
rank has left by exceptions, and which processes of its host have ended: who waits for those gives
up at once; and in which collective of torch's it sits, which ends waits of those that have not
called it.
"""

from __future__ import annotations

import atexit
import contextlib
import math
import sys
import threading
import time
import weakref
import zlib
from dataclasses import dataclass

import torch.distributed as dist

from fsdp_c import _env
from fsdp_c._comm import _hosts, _peer_location, _rendezvous
from fsdp_c._compat import _versions
from fsdp_c._native import _C

_LOOK_S = 1.0
_ASK_S = 1.0  # most waits are over by then, and ask nothing
_SILENT_S = 3.0  # of signs that come every second
_STUCK_S = 5.0  # in a collective that the waiting rank has not called
_SAID_BYTES = 200  # of it that travel, in csrc/comm/beats.c


@dataclass
class _Watched(_hosts.Hosts):
    """The rails of a group, and what this rank waits for there."""

    name: str  # of the group, short and alike on all its ranks
    transport: _C.Transport
    began: float = 0.0  # the wait
    n_notices: int = 0
    sits: str = ""  # in which collective the peer does
    sits_since: float = 0.0


def _failures_of(watched: list[_Watched]) -> str:
    """The phases that this rank has left by exceptions, one word without spaces."""
    found = [(each.name, *each.transport.failed()) for each in watched]
    return ";".join(f"{name}:{phase}:{after}" for name, phase, after in found if phase) or "-"


def _ended_in(words: str) -> list[int]:
    """Which ranks of its host a rank's sign of life calls ended."""
    fields = words.split(" ")
    return [int(rank) for rank in fields[1].split(",") if rank != "-"] if len(fields) > 2 else []


def _place() -> str:
    """In which collective this rank's program sits, and where it is; or nothing of either: a group
    of its script may be going just now."""
    try:
        place = _peer_location.tell()
    except Exception:
        return "- "
    sits = f"{place.group:x}:{place.sequence}:{int(place.is_gather)}" if place.group else "-"
    return f"{sits} {place.text}"


def _place_in(words: str) -> tuple[str, str]:
    """What `_place` has said in a rank's sign of life."""
    fields = words.split(" ", 3)
    return (fields[2], fields[3]) if len(fields) > 3 else ("-", "")


def _waits_for_us(sits: str) -> bool:
    """Whether a peer is in a collective that this rank has not called."""
    key, *numbers = sits.split(":")
    mine = _peer_location.count(int(key, 16)) if len(numbers) == 2 else None
    return mine is not None and int(numbers[0]) > mine


def _hear(watched: _Watched, peer: int, words: str) -> None:
    """Ends the wait for a peer that has left the phase in which this rank waits."""
    failures, space, _ = words.partition(" ")
    if not space:  # cut off, within a number perhaps
        return
    for text in failures.split(";"):
        name, *numbers = text.split(":")
        if name == watched.name and len(numbers) == 2:
            phase, after = map(int, numbers)
            watched.transport.hear(rank=peer, phase=phase, after=after)


class Watch:
    """Looks at what this rank waits for, in a thread of its own."""

    def __init__(self, world: dist.ProcessGroup) -> None:
        self.world = weakref.ref(world)
        self._rank = dist.get_rank()
        self._beats = _C.Beats(group=str(world.group_name), rank=self._rank)
        self._watched: weakref.WeakKeyDictionary[dist.ProcessGroup, _Watched] = (
            weakref.WeakKeyDictionary()
        )
        self._met: dict[int, _hosts.Hosts] = {}  # by rank of the world, replaced whole
        self._neighbours: dict[int, str] = {}  # the processes of ranks of this host
        self._missing: dict[int, float] = {}  # in set-up, since when
        self._looked = self._awake_since = time.monotonic()
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fsdp_c hosts", daemon=True)

    def start(self) -> None:
        self._thread.start()
        atexit.register(self.stop)
        _versions.at_destroy(end)

    def stop(self) -> None:
        atexit.unregister(self.stop)
        self._ends.set()
        self._thread.join()
        del self._beats

    def add(self, group: dist.ProcessGroup, watched: _Watched) -> None:
        self._watched[group] = watched

    def meet(self, hosts: _hosts.Hosts) -> None:
        """Ranks that have a watch, too, or are about to."""
        self._met = {**self._met, **dict.fromkeys(hosts.ranks, hosts)}
        processes = dict(zip(hosts.ranks, hosts.processes, strict=True))
        peers = hosts.peers_of(hosts.ranks.index(self._rank))
        self._neighbours = {**self._neighbours, **{rank: processes[rank] for rank in peers}}

    def look(self, missing: list[int]) -> str:
        """Why one of the ranks that set-up waits for is given up, or nothing."""
        now, before = time.monotonic(), self._missing
        self._missing = {rank: before.get(rank, now) for rank in missing if rank in self._met}
        for rank, since in self._missing.items():
            hosts = self._met[rank]
            peer = hosts.ranks.index(rank)
            silent_s, why = self._silence(hosts, peer, now - since - _ASK_S)
            if silent_s >= _env.HOST_TIMEOUT.get():
                return f"rank {rank} (host {hosts.names[hosts.hosts[peer]]}): {why}"
        return ""

    def _run(self) -> None:
        while not self._ends.wait(_LOOK_S):
            # Of what cannot be told just now, as no file can be opened, the next look tells.
            with contextlib.suppress(Exception):
                self._look_around()

    def _look_around(self) -> None:
        now = time.monotonic()
        if now - self._looked > 2 * _LOOK_S + 1:  # it was this process that stood still
            self._awake_since = now
        self._looked = now
        watched = list(self._watched.values())
        ended = [r for r, process in self._neighbours.items() if _rendezvous.is_gone(process)]
        told = ",".join(map(str, ended)) or "-"
        said = f"{_failures_of(watched)} {told} {_place()}"
        self._beats.say(said.encode()[:_SAID_BYTES].decode(errors="ignore"))
        wanted = {rank for each in watched for rank in self._look(each)}
        for rank in list(self._missing):
            hosts = self._met[rank]
            wanted.update(hosts.peers_of(hosts.ranks.index(rank)))
        self._beats.want(ranks=sorted(wanted))

    def _look(self, watched: _Watched) -> list[int]:
        """Whose signs are needed next."""
        awaited = watched.transport.awaited()
        if awaited is None or awaited[1] < _ASK_S:
            return []
        peer, waited_s = awaited
        began = time.monotonic() - waited_s
        if abs(began - watched.began) > 0.1:  # another one
            watched.began, watched.n_notices, watched.sits = began, 0, ""
        self._judge(watched, peer, waited_s)
        return watched.peers_of(peer)

    def _judge(self, watched: _Watched, peer: int, waited_s: float) -> None:
        silent_s, why = self._silence(watched, peer, waited_s - _ASK_S)
        watched.transport.tell(rank=peer, text=why)
        if waited_s >= _rendezvous.notice_at(watched.n_notices):
            watched.n_notices += 1
            line = (
                f"[fsdp_c] rank {self._rank} has waited {waited_s:.0f} s for rank"
                f" {watched.ranks[peer]} (host {watched.names[watched.hosts[peer]]}); {why}"
            )
            print(line, file=sys.stderr, flush=True)
        if silent_s >= _env.HOST_TIMEOUT.get():
            watched.transport.interrupt(why)
        elif said := self._beats.heard(watched.ranks[peer]):
            _hear(watched, peer, said[0])
            self._judge_place(watched, *_place_in(said[0]))

    def _judge_place(self, watched: _Watched, sits: str, text: str) -> None:
        """Ends a wait for a peer that waits for a call of this rank's, since some time."""
        now = time.monotonic()
        if sits != watched.sits or not _waits_for_us(sits):
            watched.sits, watched.sits_since = sits, now
        elif now - watched.sits_since >= _STUCK_S:
            if sits.endswith(":1"):
                why = (
                    f"it is in a gather of full parameters ({text}) that rank {self._rank} has not"
                    " called: is it saving alone? All ranks must call it. Neither could go on"
                )
            else:
                why = (
                    f"it is in a collective ({text}) that rank {self._rank} has not called: all"
                    " ranks of its process group must call it. Neither could go on"
                )
            watched.transport.interrupt(why)

    def _silence(self, hosts: _hosts.Hosts, peer: int, asked_s: float) -> tuple[float, str]:
        """For how long the peer's host has been silent, and what to say of the peer."""
        asked_s = min(asked_s, time.monotonic() - self._awake_since)
        store_s = min(self._beats.answered(), asked_s)
        if store_s >= _SILENT_S:
            return store_s, (
                f"nothing has been heard of it, nor of the store that ranks meet at, for"
                f" {store_s:.0f} s: a host is down, stopped or has lost its network"
            )
        heard = {rank: self._beats.heard(rank) for rank in hosts.peers_of(peer)}
        tellers = [r for r, row in heard.items() if row and hosts.ranks[peer] in _ended_in(row[0])]
        if tellers:
            return math.inf, f"its process has ended, as rank {tellers[0]} of its host tells"
        silent = {rank: min(row[1] if row else asked_s, asked_s) for rank, row in heard.items()}
        rank, host = hosts.ranks[peer], hosts.names[hosts.hosts[peer]]
        if silent[rank] < _SILENT_S:
            words = _place_in(heard[rank][0])[1] if heard[rank] else ""
            return 0.0, f"it is at {words}" if words else f"host {host} answers"
        host_s = min(silent.values())
        if host_s < _SILENT_S:
            return 0.0, f"its process does not answer (is it stopped?); others of host {host} do"
        return host_s, (
            f"nothing has been heard of host {host} for {host_s:.0f} s: it is down, stopped or has"
            " lost its network"
        )


_watch: Watch | None = None


def meet(hosts: _hosts.Hosts) -> None:
    """Ranks of several hosts have met: they leave signs of life from now on. Local."""
    global _watch
    world = dist.group.WORLD
    assert world is not None
    if _watch is not None and _watch.world() is not world:
        end()
    if _watch is None:
        _watch = Watch(world)
        _watch.start()
        _rendezvous.look_at_hosts_by(_watch.look)
    _watch.meet(hosts)


def end() -> None:
    """A world's store ends with it, and numbers of ranks mean others in the next one."""
    global _watch
    if _watch is not None:
        _rendezvous.look_at_hosts_by(None)
        _watch.stop()
        _watch = None


def watch(group: dist.ProcessGroup, transport: _C.Transport) -> None:
    """From now on this rank's waits over the transport's rails are looked at; after `meet`."""
    assert _watch is not None
    name = f"{zlib.crc32(str(group.group_name).encode()):x}"
    _watch.add(group, _Watched(**vars(_hosts.of(group)), name=name, transport=transport))

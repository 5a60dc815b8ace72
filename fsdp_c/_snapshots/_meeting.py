"""How the ranks of a run meet before the first step: what each has, and who fails."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from fsdp_c import _env
from fsdp_c._comm import _beats, _hosts, _process_group, _rendezvous
from fsdp_c._fully_shard import _fsdp_module

Answer = dict[str, Any]
_OLD_STORE = (
    "Snapshots: torchrun gives ranks that it starts again the store of those before them, in which"
    " gloo finds addresses of processes that are gone, and fails about every other time. Set"
    " TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun, and give it --rdzv-backend=c10d"
    " --rdzv-endpoint=HOST:PORT in place of --master-addr and --master-port, with which that has no"
    " effect: each start then gets a store of its own"
)


class Meeting:
    """The ranks of the world, or this process alone."""

    def __init__(self) -> None:
        is_alone = not dist.is_initialized() or dist.get_world_size() == 1
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.world = 1 if is_alone else dist.get_world_size()
        self.group = dist.group.WORLD if dist.is_initialized() else None
        self._exchange: Callable[[str, bytes], list[bytes]] = lambda what, mine: [mine]

    def open(self) -> None:
        """Local.

        Raises:
            NotImplementedError: the ranks are not processes that can meet.
        """
        if self.world == 1:
            return
        exchange = _rendezvous.exchange_for(self.group) if self.group is not None else None
        if exchange is None:
            raise NotImplementedError("Snapshots: ranks must be processes with a store in common")
        self._exchange = exchange
        if self.rank == 0 and _env.restarts_with_old_store():
            if "gloo" in str(dist.get_backend_config()):
                _fsdp_module.warn_user(_OLD_STORE)

    def tell(self, what: str, mine: Answer) -> list[Answer]:
        """All ranks' answers. Collective."""
        return [json.loads(answer) for answer in self._exchange(what, json.dumps(mine).encode())]

    def agree(self, what: str, error: Exception | None) -> None:
        """Raises on all ranks where one has an error; collective."""
        raise_first(self.tell(what, {"error": self.told(error)}), error)

    def meet_hosts(self, answers: Sequence[Answer]) -> _hosts.Hosts:
        """Ranks of several hosts leave signs of life for those that wait for them."""
        columns = ([answer[name] for answer in answers] for name in ("process", "host"))
        hosts = _hosts.Hosts.of(*columns, ranks=list(range(len(answers))))
        if len(hosts.names) > 1:
            _beats.meet(hosts)
        return hosts

    def bytes_group(self) -> dist.ProcessGroup:
        """For what is long; on the host, and for nothing else. Collective."""
        group = dist.new_group(backend="gloo", group_desc="fsdp_c_snapshots")
        assert group is not None
        return group

    def told(self, error: Exception | None) -> str:
        return f"{error} (rank {self.rank})" if error is not None else ""

    @property
    def store(self) -> dist.Store | None:
        return _rendezvous.store_of(self.group) if self.group is not None else None

    @property
    def timeout_s(self) -> float:
        if self.group is None:
            return 0.0
        return _process_group.timeout_s(self.group, torch.device("cpu"))


def raise_first(answers: Sequence[Answer], mine: Exception | None) -> None:
    """This rank's error, or else the first of another's."""
    reason = next((answer["error"] for answer in answers if answer["error"]), "")
    if reason:
        raise mine or RuntimeError(reason)


def on_this_host(answers: Sequence[Answer], rank: int) -> list[int]:
    """Ranks whose files can be seen from here."""
    host = _host_of(answers[rank])
    return [
        peer
        for peer, answer in enumerate(answers)
        if peer == rank or (_host_of(answer) == host and _is_seen(answer))
    ]


def _host_of(answer: Answer) -> str:
    return answer["process"].split("/")[0]


def _is_seen(answer: Answer) -> bool:
    """Whether the rank's page is the file of that name here."""
    try:
        about = os.lstat(answer["paths"][0])
    except OSError:
        return False
    return [about.st_dev, about.st_ino] == answer["page"]

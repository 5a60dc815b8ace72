"""What this rank has sent to other hosts, as the core counts it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fsdp_c._comm import _hosts, _transport
from fsdp_c._fully_shard._fsdp_param_group import FSDPParamGroup


@dataclass(frozen=True)
class Link:
    """What this rank has sent to the ranks of another host, for all models of the process.

    Over rails alone. ``bytes`` without the words that say what they belong to. Hosts of one name
    count as one.

    Examples:
        >>> for link in fsdp_c.stats(model).links:
        ...     print(link.host, link.bytes, link.messages)
    """

    host: str
    bytes: int
    messages: int

    def __sub__(self, earlier: Link) -> Link:
        """What came since ``earlier``."""
        return Link(self.host, self.bytes - earlier.bytes, self.messages - earlier.messages)


def links_of(groups: Iterable[FSDPParamGroup]) -> tuple[Link, ...]:
    """By host, over the process groups of these units; empty where all ranks share a host."""
    infos = [info for group in groups for info in (group.mesh_info, group.post_forward_mesh_info)]
    found = {
        process_group
        for info in infos
        for name in ("shard_process_group", "replicate_process_group")
        if (process_group := getattr(info, name, None)) is not None
    }
    sums: dict[str, Link] = {}
    for process_group in found:
        sent = _transport.sent_to_hosts(process_group)
        for host, (n_bytes, messages) in zip(_hosts.names(process_group), sent, strict=True):
            so_far = sums.get(host, Link(host, 0, 0))
            sums[host] = Link(host, so_far.bytes + n_bytes, so_far.messages + messages)
    return tuple(sums[host] for host in sorted(sums) if sums[host].messages)

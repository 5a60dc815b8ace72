"""The table of strategies: what each of them shards over which mesh dims, and when."""

from __future__ import annotations

from dataclasses import dataclass

from fsdp_c import _text

REPLICATE, SHARD = "replicate", "shard"


@dataclass(frozen=True)
class Strategy:
    """One way to spread a model over ranks. All run on the same units of ``fully_shard``.

    Examples:
        >>> zero3 = fsdp_c.STRATEGIES["zero3"]
        >>> print(zero3.summary, zero3.is_sharded, zero3.is_hybrid, zero3.gathers)
    """

    name: str
    summary: str
    dims: tuple[str, ...]  # of the mesh that the user thinks of
    # Mesh dims over which each is split between two steps; () is whole on every rank.
    parameters: tuple[str, ...]
    gradients: tuple[str, ...]
    optimizer: tuple[str, ...]
    # Whether a unit's parameters are given up between its forward and its backward.
    reshard_after_forward: bool
    # Whether micro-batches within `no_sync` are added up in whole gradients, sent once at the end.
    keeps_unsharded_gradients: bool
    deepspeed_stage: int
    fsdp1: str  # member of torch's ShardingStrategy

    @property
    def is_hybrid(self) -> bool:
        return len(self.dims) == 2

    @property
    def is_sharded(self) -> bool:
        return SHARD in self.dims

    @property
    def gathers(self) -> int:
        """All-gathers of a unit's parameters over the shard dim, per step."""
        return (1 + self.reshard_after_forward) if self.is_sharded else 0

    def volume(self, n_shards: int, n_replicas: int = 1) -> float:
        """Bytes that a rank receives in a step, over the bytes of the model, all in one dtype.

        An all-gather and a reduce-scatter bring (n-1)/n of what they are about, an all-reduce
        twice as much.

        Examples:
            >>> print(fsdp_c.STRATEGIES["hybrid"].volume(n_shards=8, n_replicas=4))
        """
        over_shards = (n_shards - 1) / n_shards
        over_replicas = 2 * (n_replicas - 1) / n_replicas
        return (self.gathers + self.is_sharded) * over_shards + over_replicas / n_shards


_S = (SHARD,)

STRATEGIES: dict[str, Strategy] = {
    strategy.name: strategy
    for strategy in (
        Strategy(
            "ddp",
            "every rank holds everything, gradients are all-reduced",
            (REPLICATE,),
            (),
            (),
            (),
            reshard_after_forward=False,
            keeps_unsharded_gradients=True,
            deepspeed_stage=0,
            fsdp1="NO_SHARD",
        ),
        Strategy(
            "zero1",
            "shards between steps, whole from forward to backward, whole gradients in no_sync",
            _S,
            _S,
            _S,
            _S,
            reshard_after_forward=False,
            keeps_unsharded_gradients=True,
            deepspeed_stage=1,
            fsdp1="SHARD_GRAD_OP",
        ),
        Strategy(
            "zero2",
            "shards between steps, whole from forward to backward, gradients are sharded at once",
            _S,
            _S,
            _S,
            _S,
            reshard_after_forward=False,
            keeps_unsharded_gradients=False,
            deepspeed_stage=2,
            fsdp1="SHARD_GRAD_OP",
        ),
        Strategy(
            "zero3",
            "a unit is whole only while it runs",
            _S,
            _S,
            _S,
            _S,
            reshard_after_forward=True,
            keeps_unsharded_gradients=False,
            deepspeed_stage=3,
            fsdp1="FULL_SHARD",
        ),
        Strategy(
            "hybrid",
            "zero3 within a shard group, replicas of it all-reduce gradients",
            (REPLICATE, SHARD),
            _S,
            _S,
            _S,
            reshard_after_forward=True,
            keeps_unsharded_gradients=False,
            deepspeed_stage=3,
            fsdp1="HYBRID_SHARD",
        ),
        Strategy(
            "hybrid_zero2",
            "zero2 within a shard group, replicas of it all-reduce gradients",
            (REPLICATE, SHARD),
            _S,
            _S,
            _S,
            reshard_after_forward=False,
            keeps_unsharded_gradients=False,
            deepspeed_stage=2,
            fsdp1="_HYBRID_SHARD_ZERO2",
        ),
    )
}


def strategy_named(name: str | Strategy) -> Strategy:
    """The strategy of that name; ValueError with the names there are, and the closest one."""
    if isinstance(name, Strategy):
        return name
    if isinstance(name, str) and (found := STRATEGIES.get(name.lower().replace("-", "_"))):
        return found
    word = getattr(name, "name", str(name))  # of FSDP1's enumeration
    of_fsdp1 = [one.name for one in STRATEGIES.values() if one.fsdp1 == word]
    hint = _text.did_you_mean(of_fsdp1[-1] if of_fsdp1 else word, STRATEGIES)
    raise ValueError(f"unknown strategy {name!r}: use one of {', '.join(STRATEGIES)}{hint}")

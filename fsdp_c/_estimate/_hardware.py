"""Kinds of hardware: what a device holds and computes, what its links carry; each with its source.

A GB of a data sheet is 10^9 bytes; what a card has beyond that goes to the driver's context and the
collectives' own buffers. Links count one direction.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from fsdp_c import _text

GB = 10**9

# Per protocol of NCCL: share of the bandwidth, and microseconds of a ring: to begin, per step over
# NVLink, over PCIe, over the network. The tables baseLat and hwLat, and the bandwidth factors, of
# NCCL 2.x, src/graph/tuning.cc; a collective takes the protocol that is fastest for its size.
NCCL_RING = {
    "LL": (0.5, 6.6, 0.6, 1.0, 2.7),
    "LL128": (0.92, 14.0, 1.9, 2.5, 4.0),
    "Simple": (1.0, 8.4, 3.4, 5.7, 14.0),
}


@dataclass(frozen=True)
class Hardware:
    """One kind of device and the hosts and network that it sits in. Seconds, bytes, per second.

    Examples:
        >>> card = fsdp_c.estimate(whole_model, world_size=1, inputs=x).setting.hardware
        >>> larger = dataclasses.replace(card, name="larger", memory=2 * card.memory)
        >>> print(fsdp_c.estimate(whole_model, world_size=8, inputs=x, hardware=larger).fits)
    """

    name: str
    engine: str  # "nccl": private copies of units, streams; "core": ranks of a host share memory
    memory: float  # bytes of a device; of the core: of the host
    flops: dict[str, float]  # dense matrix products per second, by dtype
    bandwidth: float  # of the device's memory
    per_host: int  # devices; of the core: ranks
    link: float  # between devices of a host
    link_kind: str  # "nvlink", "pcie", "memory"
    network: float  # of a device's share, between hosts
    host_link: float  # between a device and the host's memory
    efficiency: float = 1.0  # of `flops`, that large matrix products reach
    latency: float = 0.0  # per collective of the core
    per_op: float = 0.0  # per operation of the model
    cores: int = 0  # of the host; ranks beyond them take turns. 0: every rank has its own
    sources: tuple[str, ...] = field(default=(), compare=False)

    def flops_of(self, dtype: str) -> float:
        """Reached in that dtype, or in float32 if the device knows no better.

        Examples:
            >>> card = fsdp_c.estimate(whole_model, world_size=1, inputs=x).setting.hardware
            >>> print(card.flops_of("bfloat16"))
        """
        return self.flops.get(dtype, self.flops["float32"]) * self.efficiency

    def slowed(self, factor: float) -> Hardware:
        """The same where work takes so many times as long; links are as they are.

        Examples:
            >>> card = fsdp_c.estimate(whole_model, world_size=1, inputs=x).setting.hardware
            >>> half = fsdp_c.estimate(whole_model, world_size=1, inputs=x, hardware=card.slowed(2))
        """
        return replace(
            self,
            efficiency=self.efficiency / factor,
            bandwidth=self.bandwidth / factor,
            latency=self.latency * factor,
            per_op=self.per_op * factor,
        )


def _gpu(
    name: str,
    memory_gb: float,
    half: float,
    single: float,
    bandwidth_gb: float,
    link_gb: float,
    link_kind: str,
    network_gb: float,
    host_link_gb: float,
    per_host: int,
    efficiency: float,
    *sources: str,
) -> Hardware:
    flops = {"bfloat16": half * 1e12, "float16": half * 1e12, "float32": single * 1e12}
    return Hardware(
        name,
        "nccl",
        memory_gb * GB,
        flops,
        bandwidth_gb * GB,
        per_host,
        link_gb * GB,
        link_kind,
        network_gb * GB,
        host_link_gb * GB,
        efficiency,
        sources=sources,
    )


_NVLINK = "NVLink: links of the data sheet at the bandwidth of NCCL 2.x, src/graph/topo.h"
_H100_RUN = (
    "Matrix products at 0.45 of the peak: 5,762 tokens/s per GPU that torchtitan published of Llama"
    " 3.1 8B on 8 H100 (500 W) with selective checkpointing then lie between this model's with"
    " checkpointing and without"
)
_A100_RUN = (
    "Matrix products at 0.6 of the peak: PyTorch FSDP paper (Zhao et al., 2023), GPT-175B, batch 2,"
    " 186 TFLOPS per GPU, recomputation counted"
)

# float32: plain, as torch does by default, not TF32.
HARDWARE = {
    one.name: one
    for one in (
        _gpu(
            *("h100", 80, 989.4, 66.9, 3350, 18 * 20.6, "nvlink", 50, 64, 8, 0.45),
            "NVIDIA H100 SXM data sheet: 80 GB, 989.4 TFLOPS bf16 dense, 66.9 fp32, 3.35 TB/s",
            _NVLINK + " (18 links, 20.6 GB/s)",
            "NVIDIA DGX H100 data sheet: 8 GPUs, 8 network ports of 400 Gb/s, PCIe 5.0 x16",
            _H100_RUN,
        ),
        _gpu(
            *("h200", 141, 989.4, 66.9, 4800, 18 * 20.6, "nvlink", 50, 64, 8, 0.45),
            "NVIDIA H200 SXM data sheet: 141 GB, 989.4 TFLOPS bf16 dense, 66.9 fp32, 4.8 TB/s",
            _NVLINK + " (18 links, 20.6 GB/s)",
            "NVIDIA DGX H200 data sheet: 8 GPUs, 8 network ports of 400 Gb/s, PCIe 5.0 x16",
            _H100_RUN + "; assumed here too",
        ),
        _gpu(
            *("a100", 80, 312, 19.5, 2039, 12 * 20.0, "nvlink", 25, 32, 8, 0.6),
            "NVIDIA A100 80GB SXM data sheet: 80 GB, 312 TFLOPS bf16 dense, 19.5 fp32, 2,039 GB/s",
            _NVLINK + " (12 links, 20.0 GB/s)",
            "NVIDIA DGX A100 data sheet: 8 GPUs, 8 network ports of 200 Gb/s, PCIe 4.0 x16",
            _A100_RUN,
        ),
        _gpu(
            *("rtx4090", 24, 165.2, 82.6, 1008, 24, "pcie", 1.25, 32, 4, 0.6),
            "NVIDIA Ada GPU architecture whitepaper, RTX 4090: 24 GB, 165.2 TFLOPS bf16 with fp32"
            " sums, 82.6 fp32, 1,008 GB/s, PCIe 4.0 x16, no NVLink",
            "PCIe: NCCL 2.x, src/graph/topo.h, 12 GB/s for 3.0 x16, twice that for 4.0",
            "Network: 10 Gb/s per card (assumed)",
            _A100_RUN + "; assumed here too",
        ),
    )
}


def hardware_named(name: str | Hardware) -> Hardware:
    """ValueError with the names there are."""
    if isinstance(name, Hardware):
        return name
    found = HARDWARE.get(str(name).lower())
    if found is None:
        raise ValueError(
            f"unknown hardware {name!r}: use one of {', '.join(HARDWARE)}, here, or a Hardware"
            f"{_text.did_you_mean(str(name), [*HARDWARE, 'here'])}"
        )
    return found

"""Set-up of units: which of them the core can run, their layout, and binding them to it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo

from fsdp_c import _env
from fsdp_c._comm import _device, _process_group, _rendezvous, _transport
from fsdp_c._compat import _versions
from fsdp_c._fully_shard import _fqns, _fsdp_param, _model_digest, _replaced_functions
from fsdp_c._native import _C

if TYPE_CHECKING:
    from fsdp_c._fully_shard._fsdp_param import FSDPParam
    from fsdp_c._fully_shard._fsdp_param_group import FSDPParamGroup

_SUMMABLE = frozenset({torch.float32, torch.float64, torch.bfloat16, torch.float16})


def why_torch(group: FSDPParamGroup) -> str:
    """What the unit has that only torch's own implementation can run; empty: the core runs it."""
    return why_torch_everywhere(group) or why_torch_here(group)


def why_torch_everywhere(group: FSDPParamGroup) -> str:
    """What of that comes with the arguments of fully_shard: alike on all ranks."""
    mesh_info = group.mesh_info
    if group.device.type != "cpu" and not _device.is_wanted(group):
        return f"it is on {group.device.type}"
    if not isinstance(mesh_info, FSDPMeshInfo):
        return "it is replicated, not sharded"
    if _versions.is_spmd(mesh_info):
        return "dp_mesh_dims of a larger mesh"
    if mesh_info.mesh.device_type != group.device.type:
        return f"its mesh is on {mesh_info.mesh.device_type}"
    if group._num_param_groups != 1:
        return "several meshes in one unit"
    if not _device.is_wanted(group) and group.post_forward_mesh_info not in (None, mesh_info):
        return "reshard_after_forward is an int"
    if not _device.is_wanted(group) and _device.offloads(group)[1]:
        return "offloading to pinned memory"
    if dist.get_backend(mesh_info.shard_process_group) == "fake":
        return "a fake process group"
    if reason := next(filter(None, map(_why_not_plain, group.fsdp_params)), ""):
        return reason
    return _device.why_not(group) if _device.is_wanted(group) else ""


def why_torch_here(group: FSDPParamGroup) -> str:
    """What of that is set later, perhaps by a tool that runs on one rank alone."""
    if group._all_reduce_hook is not None:
        return "an all-reduce hook"
    comms = type(group._all_gather_comm), type(group._reduce_scatter_comm)
    if comms != _versions.default_comms():
        return _versions.COMM_MEMORY.get(comms[0].__name__, "custom collectives")
    for name, default in _versions.LAYOUT_FUNCTIONS.items():
        if getattr(group, name) is not default:
            return f"its {name} was replaced"
    if reason := _replaced_functions.replaced_on(group):
        return reason
    if torch._C._len_torch_dispatch_stack() != 0:
        return "a dispatch mode was active in the first forward"
    if torch._C._are_functorch_transforms_active():
        return "a functorch transform was active in the first forward"
    return ""


def agreed_reason(groups: Sequence[FSDPParamGroup], mine: str) -> str:
    """A reason for torch's road that some rank has, this one's first; collective."""
    told = f"{mine} on rank {dist.get_rank()}" if mine else ""
    for process_group in _process_groups_of(groups):
        exchange = _rendezvous.exchange_for(process_group)
        if exchange is not None:
            answers = exchange("choice of implementation", told.encode())
            told = told or next((answer.decode() for answer in answers if answer), "")
    return mine or told


def _process_groups_of(groups: Sequence[FSDPParamGroup]) -> list[dist.ProcessGroup]:
    """Those that shard, then those of the replicas; each once."""
    names = ("shard_process_group", "replicate_process_group")
    found = [getattr(group.mesh_info, name, None) for name in names for group in groups]
    return [process_group for process_group in dict.fromkeys(found) if process_group is not None]


def announce(mesh_info: Any) -> None:
    """Lets the ranks of a mesh watch one another from now on."""
    if isinstance(mesh_info, FSDPMeshInfo):
        _rendezvous.announce(mesh_info.shard_process_group)
    if isinstance(mesh_info, HSDPMeshInfo):
        _rendezvous.announce(mesh_info.replicate_process_group)


def why_not_a_tensor(fsdp_param: Any) -> str:
    """What the parameter is other than a tensor of numbers, each rank's rows of it."""
    local = fsdp_param._sharded_local_tensor
    name = fsdp_param._param_fqn or fsdp_param._module_info.param_name
    if fsdp_param.is_dtensor:
        return f"{name} is a DTensor of its own (tensor parallel)"
    if type(local) is not torch.Tensor:
        return f"{name} is a {type(local).__name__}"
    if hasattr(local, "fsdp_pre_all_gather"):
        return f"{name} has an all-gather extension"
    return f"{name} has spmd types" if _versions.is_typed_spmd(fsdp_param) else ""


def _why_not_plain(fsdp_param: Any) -> str:
    if reason := why_not_a_tensor(fsdp_param):
        return reason
    name = fsdp_param._param_fqn or fsdp_param._module_info.param_name
    if fsdp_param.sharded_param.requires_grad and _versions.takes_any_gradient(fsdp_param):
        return f"gradients of {name} may be of any dtype (grad_dtype=None)"
    dtypes = {_versions.reduce_dtype(fsdp_param), _versions.grad_dtype(fsdp_param)}
    if fsdp_param.sharded_param.requires_grad and not dtypes <= _SUMMABLE:
        return f"gradients of {name} are of another dtype than floating point"
    return ""


def _param_row(fsdp_param: Any) -> tuple[Any, ...]:
    """What the core needs to know: see parse_param in csrc/bind/fsdp/domain.cpp."""
    orig = fsdp_param.orig_dtype
    has_grad = orig in _SUMMABLE and _versions.reduce_dtype(fsdp_param) in _SUMMABLE
    reduce = _versions.reduce_dtype(fsdp_param) if has_grad else orig
    grad = _versions.grad_dtype(fsdp_param) if has_grad else orig
    return (
        *fsdp_param.geometry(),
        orig,
        _versions.compute_dtype(fsdp_param),
        reduce,
        grad,
        has_grad,
        bool(fsdp_param.sharded_param.requires_grad),
    )


def unit_name(group: FSDPParamGroup) -> str:
    if group._module_fqn is None:  # unsharded before the root's first forward
        return ", ".join(type(module).__name__ for module in group.modules)
    return _fqns.clean(group._module_fqn + ".")[:-1] or "(root)"


def state_name(state: Any) -> str:
    """How messages call the module that a forward began with."""
    group = state._fsdp_param_groups[0] if state._fsdp_param_groups else None
    return unit_name(group) if group is not None else type(state._modules[0]).__name__


def _describe(groups: Sequence[FSDPParamGroup]) -> list[list[str]]:
    """One line per parameter: unit, name, size, dtypes."""
    lines = []
    for group in groups:
        for fsdp_param in group.fsdp_params:
            _, _, _, orig, compute, reduce, grad, _, trainable = _param_row(fsdp_param)
            lines.append(
                [
                    unit_name(group),
                    fsdp_param._module_info.param_name,
                    f"size {tuple(fsdp_param._orig_size)}, {fsdp_param.fsdp_placement}",
                    f"parameter {orig}, compute {compute}, reduce {reduce}, gradient {grad}",
                    "trainable" if trainable else "frozen",
                ]
            )
    return lines


def _check_same_model(process_group: dist.ProcessGroup, groups: Sequence[FSDPParamGroup]) -> None:
    """RuntimeError on every rank, naming the first difference, unless all have the same units."""
    exchange = _rendezvous.exchange_for(process_group)
    if exchange is None:
        return
    mine = json.dumps(_describe(groups)).encode()
    words = _model_digest.words_of(_params_of(groups))
    digest = hashlib.sha256(mine).digest()
    digests = exchange("model", digest + _model_digest.digest_of(words))
    if len(set(digests)) == 1:
        return
    if len({other[: len(digest)] for other in digests}) == 1:
        _compare_origins(process_group, groups, words)
        return
    models = [json.loads(text) for text in exchange("model in full", mine)]
    ranks = _process_group.global_ranks(process_group)
    other = next(r for r in range(len(models)) if models[r] != models[0])
    ours, theirs = models[0], models[other]
    for a, b in zip(ours, theirs, strict=False):
        if a != b:
            difference = (
                f"rank {ranks[0]} has '{a[1]}' of unit '{a[0]}' ({', '.join(a[2:])}) where rank"
                f" {ranks[other]} has '{b[1]}' of unit '{b[0]}' ({', '.join(b[2:])})"
            )
            break
    else:
        longer, extra = (0, ours) if len(ours) > len(theirs) else (other, theirs)
        unit, name = extra[min(len(ours), len(theirs))][:2]
        difference = (
            f"rank {ranks[0]} shards {len(ours)} parameters and rank {ranks[other]} {len(theirs)};"
            f" only rank {ranks[longer]} has '{name}' of unit '{unit}'"
        )
    raise RuntimeError(
        f"ranks call fully_shard with different models: {difference}. Build the same model, with"
        " the same policies and the same parameters frozen, on every rank"
    )


def _params_of(groups: Sequence[FSDPParamGroup]) -> list[FSDPParam]:
    return [fsdp_param for group in groups for fsdp_param in group.fsdp_params]


def _compare_origins(
    process_group: dist.ProcessGroup, groups: Sequence[FSDPParamGroup], words: Sequence[str]
) -> None:
    exchange = _rendezvous.exchange_for(process_group)
    if exchange is not None:
        infos = [(p._param_fqn, p._module_info.param_name) for p in _params_of(groups)]
        names = [_fqns.clean(full or name) for full, name in infos]
        _model_digest.compare(exchange, words, names, _process_group.global_ranks(process_group))


def check_origins(groups: Sequence[FSDPParamGroup]) -> None:
    """For torch's road: warns if ranks built different models. Collective."""
    for process_group in _process_groups_of(groups):
        members = [g for g in groups if process_group in _process_groups_of([g])]
        _compare_origins(process_group, members, _model_digest.words_of(_params_of(members)))
    _model_digest.forget(_params_of(groups))


class _Heap:
    """What malloc keeps on its heap, in this process.

    Large shards and gradients of the core leave holes there. torch's road allocates what it
    gathers in each step, and would pay for new pages each time.
    """

    # What glibc's own, moving thresholds end at (DEFAULT_MMAP_THRESHOLD_MAX, and twice that).
    LEARNED = (32 << 20, 64 << 20)

    def __init__(self) -> None:
        self.is_set = self.serves_core = False

    def before_shards(self) -> None:
        """Shards leave the heap again when they move to shared memory."""
        if threshold := _env.mmap_threshold():
            _C.Domain.set_heap(threshold, 0)
            self.is_set = True

    def for_core(self) -> None:
        self.serves_core = True
        self.before_shards()
        _C.Domain.trim_heap()

    def for_torchs_road(self) -> None:
        if self.is_set and not self.serves_core:
            _C.Domain.set_heap(*self.LEARNED)


HEAP = _Heap()


def bind_units(
    groups: Sequence[FSDPParamGroup], streams: _C.Streams | None = None
) -> list[_C.Domain]:
    """Binds units to the core; collective over each of their process groups. Returns the domains.

    All ranks must pass the same units in the same order. On failure no unit is bound and every
    rank raises. Units on a device share the schedule of those in `streams`.
    """
    streams = _device.streams_for(groups, streams)
    by_mesh: dict[tuple[Any, Any], list[FSDPParamGroup]] = {}
    for group in groups:
        mesh_info = group.mesh_info
        replicas = (
            mesh_info.replicate_process_group if isinstance(mesh_info, HSDPMeshInfo) else None
        )
        by_mesh.setdefault((mesh_info.shard_process_group, replicas), []).append(group)
    domains: list[_C.Domain] = []
    placed = []
    for (shard_pg, replicate_pg), members in by_mesh.items():
        shard, replicate = _make_domains(shard_pg, replicate_pg, members, streams)
        domains += [domain for domain in (shard, replicate) if domain is not None]
        placed += [(group, shard, i, replicate) for i, group in enumerate(members)]
    for group, shard, index, replicate in placed:
        smaller = _device.smaller_group(group)
        if streams is not None and smaller is not None:
            _device.connect(streams, smaller, group.device)
        bind_unit(group, shard, index, replicate)
    if streams is None:
        HEAP.for_core()
    return domains


def _make_domains(
    shard_pg: dist.ProcessGroup,
    replicate_pg: dist.ProcessGroup | None,
    groups: Sequence[FSDPParamGroup],
    streams: _C.Streams | None,
) -> tuple[_C.Domain, _C.Domain | None]:
    units = [(unit_name(g), [_param_row(p) for p in g.fsdp_params]) for g in groups]
    # What replicas add up next has to be there at once.
    batch_bytes = _env.batch_bytes() if streams is None and replicate_pg is None else 0

    get = _transport.transport_for if streams is None else _transport.messages_for
    process_groups = [shard_pg] if replicate_pg is None else [shard_pg, replicate_pg]
    transports = [get(process_group) for process_group in process_groups]
    is_counted = streams is None and _any_rank(
        process_groups, any(transport.kind != "shm" for transport in transports)
    )

    def make(index: int) -> _C.Domain:
        process_group, transport = process_groups[index], transports[index]
        if streams is not None:
            _device.connect(streams, process_group, groups[0].device)
        _check_same_model(process_group, groups)
        unit_args = (units, shard_pg.rank(), shard_pg.size(), batch_bytes, is_counted)
        domain = _C.Domain(
            transport, index == 1, *unit_args, streams, str(process_group.group_name)
        )
        # On a GPU nobody waits for peers, and NCCL has a board of its own.
        is_blocking = _device.is_blocking(process_group, groups[0].device)
        if transport.kind != "shm" and is_blocking:
            watch = _transport.watch_for(process_group)
            if watch is not None:
                domain.watch(watch)
        return domain

    shard, *replicate = map(make, range(len(transports)))
    _model_digest.forget(_params_of(groups))
    return shard, replicate[0] if replicate else None


def _any_rank(process_groups: Sequence[dist.ProcessGroup], mine: bool) -> bool:
    """Whether it is so on a rank of the mesh, all of whose ranks ask; its dimensions in turn.

    Parts are laid out alike on all of them, and hosts may cut a mesh unevenly.
    """
    for process_group in process_groups if len(process_groups) > 1 else ():
        exchange = _rendezvous.exchange_for(process_group)
        if exchange is not None:
            answers = exchange("layout of gradients", b"counted" if mine else b"")
            mine = any(answers)
    return mine


@torch.no_grad()
def bind_unit(
    group: FSDPParamGroup, shard: _C.Domain, index: int, replicate: _C.Domain | None
) -> None:
    """Gives the unit's shards their place and makes its unsharded parameters; local."""
    full_bytes, offsets = shard.layout(index)
    with torch.inference_mode(False):
        # Never touched: its memory is taken away when the unit is bound.
        flat = torch.empty(full_bytes, dtype=torch.uint8, device=group.device)
        seen: set[int] = set()
        rows = []
        for fsdp_param, (offset, _) in zip(group.fsdp_params, offsets, strict=True):
            _own_storage(fsdp_param, seen)
            dtype = _versions.compute_dtype(fsdp_param)
            # Of a parameter that is held once per rank each rank reads its own.
            own = fsdp_param.mesh_info.shard_mesh_rank if fsdp_param.copies > 1 else 0
            data = torch.empty(0, dtype=dtype, device=group.device).set_(
                flat.untyped_storage(),
                offset // dtype.itemsize + own,
                fsdp_param._orig_size,
                fsdp_param.unsharded_stride,
            )
            unsharded = _parameter(data, fsdp_param.sharded_param.requires_grad)
            _fsdp_param.copy_attributes(fsdp_param.sharded_param, unsharded)
            _versions.set_grad_dtype(fsdp_param, unsharded)
            fsdp_param._unsharded_param = unsharded
            fsdp_param.unit = group
            _, _, _, _, _, reduce, grad, _, _ = _param_row(fsdp_param)
            rows.append(
                (
                    _places(fsdp_param),
                    fsdp_param.sharded_param,
                    unsharded,
                    fsdp_param,
                    reduce,
                    grad,
                    tuple(fsdp_param.sharded_size),
                    fsdp_param.local_stride,
                    fsdp_param.copies,
                )
            )
        group._bind(shard, index, replicate, rows, flat, _device.options_of(group))
        group.keep_storage()
    group._binding = (shard, index, replicate)
    group._bound_rows = [_param_row(p) for p in group.fsdp_params]
    group.choose_reduce_group()


def _parameter(data: torch.Tensor, requires_grad: bool) -> nn.Parameter:
    """One whose unit notices that `param.data` was taken, to which writes are not counted."""
    param = _C.make_noted(data)  # nn.Parameter() would make another tensor of it
    param.__class__ = nn.Parameter
    return param.requires_grad_(requires_grad)


def registrations(fsdp_param: Any) -> list[tuple[nn.Module, str]]:
    """The modules, and the names there, that a parameter is registered under."""
    info = fsdp_param._module_info
    return [
        (info.module, info.param_name),
        *zip(info.shared_modules, info.shared_param_names, strict=True),
    ]


def _places(fsdp_param: Any) -> list[tuple[dict[str, Any], str, nn.Module | None]]:
    """Where the parameter is registered; the module only where it overrides __setattr__."""
    places = []
    for module, name in registrations(fsdp_param):
        is_plain = getattr(module.__setattr__, "__func__", None) is nn.Module.__setattr__
        places.append((module._parameters, name, None if is_plain else module))
    return places


def _own_storage(fsdp_param: FSDPParam, seen: set[int]) -> None:
    """Makes the shard the only tensor of a storage of exactly its padded size."""
    local = fsdp_param._sharded_local_tensor
    if not fsdp_param.is_placed(local) or local.untyped_storage()._cdata in seen:
        local = fsdp_param.place(local)
        fsdp_param.sharded_param._local_tensor = local  # type: ignore[attr-defined]
    seen.add(local.untyped_storage()._cdata)

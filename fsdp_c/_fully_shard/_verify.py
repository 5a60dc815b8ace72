"""The self-check of a model's first steps (FSDP_C_VERIFY): its numbers beside plain collectives.

What was gathered is known by a fingerprint of all its bits, and is compared with what the process
group's own all_gather makes of the shards. Reduced gradients are compared, within rounding, with
its all_reduce of whole ones; of large parameters at some elements, which is all that is kept until
the end of backward. Nothing is compared while a step runs: ranks need not be alike there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from fsdp_c import _env
from fsdp_c._comm import _agreement, _process_group
from fsdp_c._compat import _versions
from fsdp_c._fully_shard import _fqns

_KEPT_MAX = 1 << 16  # elements of a gradient
_LOOKS_MAX = 4  # at a parameter, where many backwards come before a reduction
_STRIDE = 1 << 20  # elements whose fingerprint is taken at a time


def steps_for(groups: Sequence[Any]) -> int:
    """How many steps of a model are checked: as asked for; else the first on several GPUs."""
    asked = _env.VERIFY.get()
    if asked is not None:
        return asked
    return int(any(g.device.type == "cuda" and g.mesh_info.mesh.size() > 1 for g in groups))


def begin(state: Any, groups: Sequence[Any]) -> None:
    """Checks the next steps of a root whose units are bound."""
    n_steps = steps_for(groups)
    checked = [group for group in groups if not group.visible.reason]
    if n_steps > 0 and checked:
        _Check(state, checked, n_steps).watch()


# ---- what is compared ----


def fingerprint(tensor: torch.Tensor) -> tuple[int, int]:
    """Of the bits and their places."""
    flat = tensor.detach().contiguous().view(-1)
    size = flat.element_size()
    words = flat.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}.get(size, torch.int64))
    total = torch.zeros(2, dtype=torch.int64, device=flat.device)
    for begin in range(0, words.numel(), _STRIDE):
        part = words[begin : begin + _STRIDE].to(torch.int64)
        places = torch.arange(begin, begin + part.numel(), device=flat.device) % 65521 + 1
        total += torch.stack([part.sum(), (part * places).sum()])
    return tuple(total.tolist())  # type: ignore[return-value]


def _local(tensor: Any) -> torch.Tensor:
    return getattr(tensor, "_local_tensor", tensor)


def _settled(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A shard or its gradient; what is offloaded is read after its copy from the device."""
    if device.type == "cuda" and tensor.device != device:
        torch.cuda.synchronize(device)
    return tensor


def _at(tensor: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Elements of a tensor that may be offloaded, on the device of their places."""
    settled = _settled(tensor, places.device)
    return _widest(settled.reshape(-1)[places.to(tensor.device)]).to(places.device)


def _widest(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def _version(tensor: Any) -> int:
    """Of a DTensor, which is written to itself or through its local one."""
    local = _local(tensor)
    return int(tensor._version + (0 if local is tensor else local._version))


def _kept(numel: int) -> slice:
    """Elements of a gradient, spread over it; all of a small one."""
    return slice(0, numel, -(-numel // _KEPT_MAX) or 1)


@dataclass
class _Seen:
    """Of a parameter, on this rank."""

    group: Any
    param: Any  # FSDPParam
    # Fingerprints, and the version of the shard.
    gathered: list[tuple[tuple[int, int], int]] = field(default_factory=list)
    version: int = 0  # of the whole parameter
    gradient: torch.Tensor | None = None  # kept elements of the sum over this rank's backwards
    size: torch.Tensor | None = None  # of what was added
    n_added: int = 0
    before: torch.Tensor | None = None  # of the shard, at the first of them
    is_begun: bool = False
    is_odd: bool = False  # gradients have another layout, or have come in part

    @property
    def name(self) -> str:
        name = self.param._param_fqn or self.param._module_info.param_name
        return f"parameter {name} of unit {_fqns.unit_name(self.group)}"

    def look(self) -> None:
        """But at what the user's forward has written to."""
        is_enough = len(self.gathered) >= _LOOKS_MAX
        if not is_enough and _version(self.param._unsharded_param) == self.version:
            found = fingerprint(_local(self.param._unsharded_param))
            self.gathered.append((found, self.shard_version))

    @property
    def shard_version(self) -> int:
        return _version(self.param.sharded_param)

    def add(self, grad: torch.Tensor) -> None:
        local = _local(grad).detach()
        layouts = [getattr(t, "placements", None) for t in (grad, self.param._unsharded_param)]
        if local.shape != self.param._orig_size or layouts[0] != layouts[1]:
            self.is_odd = True
            return
        kept = _widest(local.reshape(-1)[_kept(local.numel())])
        if not self.is_begun:
            shard = self.param.sharded_param.grad
            device = self.group.device
            self.before = (
                None if shard is None else _settled(_local(shard).detach(), device).clone()
            )
            self.is_begun = True
        self.gradient = kept if self.gradient is None else self.gradient + kept
        self.size = kept.abs() if self.size is None else self.size + kept.abs()
        self.n_added += 1


class _Check:
    def __init__(self, state: Any, groups: Sequence[Any], n_steps: int) -> None:
        self._state = state
        self._groups = groups
        self._n_left = n_steps
        self._seen = [
            _Seen(group, p) for group in groups for p in group.fsdp_params if not p.is_extended
        ]
        self._handles: list[Any] = []
        self._is_queued = self._is_put_off = False
        self._is_missed = False

    def watch(self) -> None:
        """Hooks behind those of the units."""
        of_group: dict[Any, list[_Seen]] = {}
        for seen in self._seen:
            seen.version = _version(seen.param._unsharded_param)
            of_group.setdefault(seen.group, []).append(seen)
            unsharded = seen.param._unsharded_param
            if unsharded.requires_grad:
                self._handles.append(
                    unsharded.register_hook(lambda g, seen=seen: self._add(seen, g))
                )

        for group, of_unit in of_group.items():
            frozen = [seen for seen in of_unit if not seen.param._unsharded_param.requires_grad]
            for module in group.modules:
                hook = module.register_forward_pre_hook(lambda *_, g=group: self._look(of_group[g]))
                self._handles.append(hook)
                if frozen:
                    hook = module.register_forward_hook(
                        lambda *call, seen=frozen: self._await_gather(seen, call[-1])
                    )
                    self._handles.append(hook)
        for module in self._state._modules:
            self._handles.append(module.register_forward_hook(self._await_backward))

    def _look(self, of_unit: list[_Seen]) -> None:
        has_failed = self._is_queued and torch._C._current_graph_task_id() == -1
        if self._is_missed or has_failed:
            self._end()  # what came is not whole
        for seen in of_unit if self._handles else ():
            seen.look()

    def _await_gather(self, frozen: list[_Seen], output: Any) -> None:
        """Backward gathers a unit again; no gradient tells of parameters that have none."""

        def look(grad: torch.Tensor) -> None:
            group = frozen[0].group
            is_gathered = group._reshard_after_forward and group._core_is_unsharded
            for seen in frozen if self._handles and is_gathered else ():
                seen.look()

        for tensor in tree_leaves(output):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                tensor.register_hook(look)

    def _await_backward(self, module: Any, inputs: Any, output: Any) -> None:
        """The end of the outermost backward is where gradients are compared."""
        for tensor in tree_leaves(output):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                tensor.register_hook(lambda grad: self._queue())

    def _add(self, seen: _Seen, grad: torch.Tensor) -> None:
        if seen.group._reshard_after_forward or not seen.gathered:
            seen.look()  # it was gathered anew; or before there were hooks on the root
        seen.add(grad)
        self._queue()

    def _queue(self) -> None:
        if not self._is_queued:
            self._is_queued = True
            # After the root's own, which it has queued before.
            torch.autograd.Variable._execution_engine.queue_callback(self._compare)

    def _end(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _compare(self) -> None:
        in_phase = any(seen.group._core_in_phase for seen in self._seen)
        if in_phase and not self._is_put_off:
            # A cast output tells of a backward before the root has queued its end.
            self._is_put_off = True
            torch.autograd.Variable._execution_engine.queue_callback(self._compare)
            return
        self._is_queued = self._is_put_off = False
        # What has ended is a backward inside of another one, if the units are in theirs.
        self._is_missed = in_phase
        # Held gradients are compared with the backward that reduces them. Who has not reduced what
        # others have is told so by the core, at its next forward.
        if self._is_missed or not all(map(_is_reduced, self._groups)):
            return
        # Ranks meet where a wait has a deadline and names who is missing.
        _agreement.first_reason_of_units("self-check", self._groups, "")
        self._n_left -= 1
        if self._n_left <= 0:
            self._end()
        with torch.no_grad():
            wrong = [what for seen in self._seen for what in compare(seen)]
        mine = "; ".join(wrong[:3]) + (f"; {len(wrong) - 3} more" if len(wrong) > 3 else "")
        found = _agreement.first_reason_of_units("self-check", self._groups, mine)
        for seen in self._seen:
            seen.gathered = []
        if found:
            self._give_up(found)

    def _give_up(self, found: str) -> None:
        self._end()
        root = self._state._root
        if root is not None:
            self._state._hand_over(list(root.states), f"the self-check of its first step: {found}")
        raise RuntimeError(
            f"the self-check of this step (FSDP_C_VERIFY) has found, on rank {dist.get_rank()} or"
            f" another: {found}. Drop this step's gradients (zero_grad) and repeat it: torch's"
            " implementation runs the model from now on. Please report this"
        )


# ---- plain collectives ----


def _process_groups(group: Any) -> list[dist.ProcessGroup]:
    found = _agreement.process_groups_of([group.mesh_info])
    return [process_group for process_group in found if process_group.size() > 1]


def gathered_plainly(seen: _Seen) -> torch.Tensor:
    """The whole parameter, of the dtype that forward computes in."""
    param = seen.param
    group = getattr(seen.group.mesh_info, "shard_process_group", _process_group.ALONE)
    own = _local(param.sharded_param).detach()
    own = own.to(seen.group.device, _versions.compute_dtype(param))  # it may be offloaded
    if group.size() == 1 or not param._orig_size:  # a scalar is every rank's
        return own
    dim = param.fsdp_placement.dim
    rows = param._orig_size[dim]
    padded = own.new_zeros(
        [-(-rows // group.size()) if d == dim else n for d, n in enumerate(param._orig_size)]
    )
    padded.narrow(dim, 0, own.size(dim)).copy_(own)
    parts = [torch.empty_like(padded) for _ in range(group.size())]
    dist.all_gather(parts, padded, group=group)
    return torch.cat(parts, dim).narrow(dim, 0, rows)


def compare(seen: _Seen) -> list[str]:
    """What is wrong with the parameter on this rank. Collective."""
    wrong = []
    right = fingerprint(gathered_plainly(seen)), seen.shard_version
    if any(found != right and found[1] == right[1] for found in seen.gathered):
        wrong.append(f"{seen.name} was gathered with other bits than an all_gather has")
    if seen.param.sharded_param.requires_grad and (what := _compare_gradient(seen)):
        wrong.append(what)
    return wrong


def _is_reduced(group: Any) -> bool:
    """Whether backward adds up the unit's gradients over all ranks."""
    return bool(group.reduce_grads and group.all_reduce_grads)


def _places(param: Any, rank: int, n_ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the kept elements: which are in this rank's rows, and where these lie in its shard."""
    size = list(param._orig_size)
    kept = _kept(torch.Size(size).numel())
    places = torch.arange(0, kept.stop, kept.step)
    if not size:
        return torch.ones_like(places, dtype=torch.bool), places
    dim = param.fsdp_placement.dim
    inner = torch.Size(size[dim + 1 :]).numel()
    row = places // inner % size[dim]
    chunk = -(-size[dim] // n_ranks)
    first, end = min(rank * chunk, size[dim]), min((rank + 1) * chunk, size[dim])
    is_own = (row >= first) & (row < end)
    outer = places // (inner * size[dim])
    local = (outer * (end - first) + row - first) * inner + places % inner
    return is_own, local[is_own]


def _is_sum(
    found: torch.Tensor,
    wanted: torch.Tensor,
    sizes: torch.Tensor,
    undivided: torch.Tensor,
    n_added: torch.Tensor,
    dtypes: Sequence[torch.dtype],
) -> torch.Tensor:
    """Whether it is what is wanted, but for what adding up in these dtypes rounds or overflows."""
    infos = [torch.finfo(dtype) for dtype in dtypes]
    n_roundings = n_added + 6  # casts and divisions, too; each by half a unit at most
    bound = sizes * torch.expm1(n_roundings * max(info.eps for info in infos) / 2)
    bound = bound + n_roundings * max(info.smallest_normal * info.eps for info in infos) / 2
    is_near = (found - wanted).abs() <= bound + 1e-30
    overflows = undivided >= min(info.max for info in infos)
    is_finite = torch.isfinite(wanted)
    return torch.where(torch.isfinite(found), is_near & is_finite, overflows | ~is_finite)


def _compare_gradient(seen: _Seen) -> str:
    param, info = seen.param, seen.group.mesh_info
    shards = getattr(info, "shard_process_group", _process_group.ALONE)
    kept = _kept(torch.Size(param._orig_size).numel())
    n_kept, device = len(range(0, kept.stop, kept.step)), seen.group.device
    # Sums, sums of sizes, and how many gradients there were.
    total = _widest(torch.zeros(2 * n_kept + 1, dtype=param.orig_dtype, device=device))
    if seen.gradient is not None and seen.size is not None:
        total[:n_kept], total[n_kept:-1], total[-1] = seen.gradient, seen.size, seen.n_added
    for process_group in _process_groups(seen.group):
        dist.all_reduce(total, group=process_group)
    before, seen.gradient, seen.size, seen.before = seen.before, None, None, None
    seen.n_added, seen.is_begun = 0, False
    if total[-1] == 0 or seen.is_odd or param.sharded_param._post_accumulate_grad_hooks:
        return ""  # such hooks may have changed it, or stepped
    is_own, at = (t.to(device) for t in _places(param, shards.rank(), shards.size()))
    divisor = seen.group.gradient_divide_factor or info.mesh.size()
    undivided = total[n_kept:-1].real[is_own]
    wanted, sizes = total[:n_kept][is_own] / divisor, undivided / divisor
    n_added = total[-1].real
    shard = param.sharded_param.grad
    if before is not None:
        old = _at(before, at)
        wanted, sizes = wanted + old, sizes + old.abs()
    if shard is None:
        return f"the gradient of {seen.name} was lost" if at.numel() else ""
    local = _local(shard)
    found = _at(local, at)
    dtypes = (_versions.reduce_dtype(param), _versions.grad_dtype(param), local.dtype)
    is_wrong = ~_is_sum(found, wanted, sizes, undivided, n_added, dtypes)
    if not bool(is_wrong.any()):
        return ""
    worst = int(is_wrong.nonzero()[0])
    return (
        f"the reduced gradient of {seen.name} is {found[worst].item():.6g} where a plain sum is"
        f" {wanted[worst].item():.6g} ({int(is_wrong.sum())} of {at.numel()} elements differ)"
    )

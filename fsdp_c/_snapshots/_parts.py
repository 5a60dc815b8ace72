"""Parts of a snapshot: what each is of in words, packed again only where that has changed.

To pack a model of a hundred parameters and their state takes milliseconds, to see that they are the
same objects as before a tenth of one.
"""

from __future__ import annotations

import io
import operator
import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn, optim
from torch.distributed.device_mesh import DeviceMesh

from fsdp_c._fully_shard import _fqns, _fsdp_init
from fsdp_c._native import _C
from fsdp_c._snapshots import _tensors

_VALUES = (bool, int, float, complex, str, bytes, type(None))


class Part:
    """Pieces of memory and pickles that tell what they are."""

    def __init__(self, text: bytes, pieces: _tensors.Pieces) -> None:
        self.text = text
        self.pieces = pieces
        self.sizes = pieces.sizes
        self._then = self._layout()

    def _layout(self) -> bytes:
        return _C.snapshot_layouts(self.pieces.sources)

    def is_true_still(self) -> bool:
        """Of tensors that are the same objects: whether their memory is laid out as it was."""
        return (
            not self.pieces.changes_unseen
            and all(tensor._local_tensor is local for tensor, local in self.pieces.dtensors)
            and self._layout() == self._then
        )


def pack(values: Iterable[tuple[str, Any]], pieces: _tensors.Pieces) -> Part:
    """Pickles of values, each with how errors call it."""
    file = io.BytesIO()
    for what, value in values:
        try:
            _tensors.dump(value, file, pieces)
        except Exception as error:  # whatever an object of the user's raises
            raise ValueError(
                f"Snapshots: {what} cannot be pickled ({type(error).__name__}: {error}): give it a"
                " state_dict() and load_state_dict(), or leave it out"
            ) from error
    return Part(file.getvalue(), pieces)


def _can_be_told(leaf: Any) -> bool:
    """Whether it is another object when it has changed, its memory apart."""
    return isinstance(leaf, (Tensor, *_VALUES))


def _are_alike(now: list[Any], before: list[Any], is_same: Callable[[Any, Any], bool]) -> bool:
    """As long; nearly always they are the same objects, which C sees alone."""
    return all(map(operator.is_, now, before)) or all(map(is_same, now, before))


class Kept:
    """The last part, and by which objects it was packed."""

    def __init__(self) -> None:
        self._seen: list[Any] | None = None
        self._part: Part | None = None

    def part(
        self,
        seen: list[Any] | None,
        is_same: Callable[[Any, Any], bool],
        make: Callable[[], Part],
    ) -> Part:
        """`seen`: what the part depends on; None: something else, too."""
        if (
            self._part is None
            or seen is None
            or self._seen is None
            or len(seen) != len(self._seen)
            or not _are_alike(seen, self._seen, is_same)
            or not self._part.is_true_still()
        ):
            self._part = make()
            self._seen = seen if seen is not None and all(map(_can_be_told, seen)) else None
        return self._part

    def drop(self) -> None:
        self._part = None


# ---- models ----


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """A model's shards, other parameters and buffers, by the names of its state dict. Local."""
    shards: dict[tuple[int, str], Tensor] = {}
    for fsdp_param in _fsdp_params_of(model):
        info = fsdp_param._module_info
        modules = [info.module, *info.shared_modules]
        names = [info.param_name, *info.shared_param_names]
        for owner, name in zip(modules, names, strict=True):
            shards[id(owner), name] = fsdp_param.sharded_param
    found: dict[str, Tensor] = {}
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            tensor = shards.get((id(module), name), tensor)
            if tensor is not None and id(tensor) not in seen:
                seen.add(id(tensor))
                found[_fqns.clean(f"{prefix}.{name}" if prefix else name)] = tensor
    return found


def _fsdp_params_of(model: nn.Module) -> Iterator[Any]:
    for module in model.modules():
        for group in _fsdp_init.groups_of(module):
            if getattr(group, "is_offloaded", False):
                raise RuntimeError("Snapshots: the model was moved away by offload()")
            yield from group.fsdp_params


class ModelsPart(Kept):
    """Tensors of all models."""

    def __init__(self, models: Sequence[nn.Module], may_wait: bool) -> None:
        """`may_wait`: who writes parameters waits until they are copied."""
        super().__init__()
        self._models = models
        self._may_wait = may_wait
        self._fsdp_params: list[tuple[Any, Tensor]] = []

    def get(self, make_pieces: Callable[[set[int]], _tensors.Pieces]) -> Part:
        def make() -> Part:
            self._fsdp_params = [
                (p, p.sharded_param) for model in self._models for p in _fsdp_params_of(model)
            ]
            tensors = [tensors_of(model) for model in self._models]
            # Buffers do not wait: forwards write them, and batch norm's without telling.
            waits = {id(t) for m in tensors for t in m.values() if isinstance(t, nn.Parameter)}
            pieces = make_pieces(waits if self._may_wait else set())
            described = [_described(named, pieces) for named in tensors]
            return pack([("the models", described)], pieces)

        is_same = all(p.sharded_param is shard for p, shard in self._fsdp_params)
        seen = [tensor for model in self._models for tensor in _registered(model)]
        return self.part(seen if is_same else None, operator.is_, make)


def _registered(model: nn.Module) -> Iterator[Tensor | None]:
    """Whatever modules hold now, in an order that stays: to see whether it is the same."""
    left, seen = [model], set()
    while left:
        module = left.pop()
        if module is not None and id(module) not in seen:
            seen.add(id(module))
            yield from module._parameters.values()
            yield from module._buffers.values()
            left += module._modules.values()


def _described(tensors: dict[str, Tensor], pieces: _tensors.Pieces) -> dict[str, Any]:
    found = {name: pieces.describe(tensor) for name, tensor in tensors.items()}
    for name, one in found.items():
        if one is None:
            kind = f"{type(tensors[name]).__name__} of layout {tensors[name].layout}"
            where = " on the meta device" if tensors[name].is_meta else ""
            raise ValueError(f"Snapshots: '{name}' is a {kind}{where}, which cannot be kept")
    return found


# ---- optimizers ----


def params_of(optimizer: Any) -> list[Tensor]:
    groups = getattr(optimizer, "param_groups", ())
    return [param for group in groups for param in group["params"]]


def calls_hooks(optimizer: Any) -> bool:
    """Whether it waits before it steps; what only looks like torch's optimizers does not."""
    return isinstance(optimizer, optim.Optimizer) and hasattr(
        optimizer, "_optimizer_step_pre_hooks"
    )


def is_stock(optimizer: Any) -> bool:
    """Whether state and groups are all that it keeps, as torch.optim's own classes have it."""
    cls = type(optimizer)
    return (
        isinstance(optimizer, optim.Optimizer)
        and cls.state_dict is optim.Optimizer.state_dict
        and cls.load_state_dict is optim.Optimizer.load_state_dict
    )


class OptimizerPart(Kept):
    """What has to be the same when it is loaded, and its state."""

    def __init__(self, optimizer: Any, what: str) -> None:
        super().__init__()
        self._optimizer = optimizer
        self._what = what

    def get(
        self,
        make_pieces: Callable[[set[int]], _tensors.Pieces],
        form: Callable[[], Any],
    ) -> Part:
        def make() -> Part:
            pieces = make_pieces(_state_tensors(self._optimizer))
            values = pickle.dumps(form()), state_of(self._optimizer)
            return pack([(self._what, value) for value in values], pieces)

        seen = _leaves(self._optimizer) if is_stock(self._optimizer) else None
        return self.part(seen, _is_same_leaf, make)


def _state_tensors(optimizer: Any) -> set[int]:
    """Ids of what changes in its steps alone."""
    if not calls_hooks(optimizer):
        return set()
    states = [state for state in optimizer.state.values() if isinstance(state, dict)]
    return {id(value) for state in states for value in state.values()}


def _leaves(optimizer: optim.Optimizer) -> list[Any] | None:
    """All that state and groups hold; None: more than that."""
    found: list[Any] = []
    for key, state in optimizer.state.items():
        if type(state) is not dict:
            return None
        found.append(key)
        found += state.keys()
        found += state.values()
    for group in optimizer.param_groups:
        for key, value in group.items():
            found.append(key)
            if key == "params":
                found += value
            elif type(value) is tuple:
                found += value
            else:
                found.append(value)
    return found


def _is_same_leaf(now: Any, before: Any) -> bool:
    if now is before:
        return True
    return type(now) is type(before) and not isinstance(now, Tensor) and now == before


def state_of(optimizer: Any) -> Any:
    """Its state; of stock ones by the numbers of parameters, without torch's casts."""
    if not is_stock(optimizer):
        return optimizer.state_dict()
    places = {id(param): place for place, param in enumerate(params_of(optimizer))}
    state = [
        (places.get(id(key)), None if id(key) in places else key, value)
        for key, value in optimizer.state.items()
    ]
    groups = [
        {key: value for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]
    return state, groups


def set_state(optimizer: Any, saved: Any) -> None:
    """What `state_of` has returned."""
    if not is_stock(optimizer):
        optimizer.load_state_dict(saved)
        return
    state, groups = saved
    params = params_of(optimizer)
    optimizer.state.clear()
    for place, key, value in state:
        optimizer.state[key if place is None else params[place]] = value
    for group, options in zip(optimizer.param_groups, groups, strict=True):
        for key, value in options.items():
            group[key] = value


def meshes_of(tensors: Iterable[Tensor]) -> list[DeviceMesh]:
    """Each once."""
    found: list[DeviceMesh] = []
    for tensor in tensors:
        mesh = getattr(tensor, "device_mesh", None)
        if mesh is not None and mesh not in found:
            found.append(mesh)
    return found

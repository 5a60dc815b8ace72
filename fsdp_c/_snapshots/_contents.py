"""What a snapshot is of: models, optimizers, random numbers and what else the user names."""

from __future__ import annotations

import io
import pickle
import random
import sys
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn, optim
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fsdp_c._fully_shard import _fqns, _fsdp_init
from fsdp_c._snapshots import _tensors

FORMAT = 1
_SHOWN = 3  # names in an error


class Packed(NamedTuple):
    """A snapshot before it is copied."""

    index: bytes
    pieces: _tensors.Pieces


class Contents:
    """The objects of a run, by which it goes on."""

    def __init__(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[Any],
        extra: MutableMapping[str, Any],
    ) -> None:
        self.models = list(models)
        self.optimizers = list(optimizers)
        self.extra = extra

    # ---- to a snapshot ----

    def pack(self, written: dict[int, Tensor]) -> Packed:
        """`written`: tensors that the program writes between its updates, by id.

        Raises:
            ValueError: something that cannot be kept, with its name.
        """
        models = [tensors_of(model) for model in self.models]
        pieces = _tensors.Pieces(self._meshes(models), self._may_wait(models, written))
        described = [_described(tensors, pieces) for tensors in models]
        rest = io.BytesIO()
        for what, value in self._rest():
            _dump(what, value, rest, pieces)
        file = io.BytesIO()
        head = {"format": FORMAT, "models": described, "sizes": pieces.sizes}
        head["optimizers"] = [self._form_of(optimizer, models) for optimizer in self.optimizers]
        pickle.dump(head, file, protocol=pickle.HIGHEST_PROTOCOL)
        return Packed(file.getvalue() + rest.getvalue(), pieces)

    def _rest(self) -> Iterator[tuple[str, Any]]:
        """What is put back as it was; with how errors call it."""
        for number, optimizer in enumerate(self.optimizers):
            yield f"the state of optimizer {number}", _state_of(optimizer)
        yield "the states of random number generators", _rng_states()
        yield "the keys of extra", list(self.extra)
        for key, value in self.extra.items():
            yield f"extra[{key!r}]", _kept_of(value)

    def _meshes(self, models: Sequence[dict[str, Tensor]]) -> list[DeviceMesh]:
        tensors = [tensor for model in models for tensor in model.values()]
        tensors += [param for optimizer in self.optimizers for param in _params_of(optimizer)]
        meshes: list[DeviceMesh] = []
        for tensor in tensors:
            if isinstance(tensor, DTensor) and tensor.device_mesh not in meshes:
                meshes.append(tensor.device_mesh)
        return meshes

    def _may_wait(
        self, models: Sequence[dict[str, Tensor]], written: dict[int, Tensor]
    ) -> set[int]:
        """Ids of what stays as it is until the next update: parameters and state of optimizers.

        Buffers do not: forwards write them, and batch norm's without telling.
        """
        found = {id(t) for model in models for t in model.values() if isinstance(t, nn.Parameter)}
        for optimizer in self.optimizers:
            if isinstance(optimizer, optim.Optimizer):
                for state in optimizer.state.values():
                    if isinstance(state, dict):
                        found |= {id(value) for value in state.values()}
        return found - written.keys()

    def _form_of(self, optimizer: Any, models: Sequence[dict[str, Tensor]]) -> Any:
        """What has to be the same when it is loaded."""
        names = {
            id(tensor): f"{at}.{name}" if len(models) > 1 else name
            for at, model in enumerate(models)
            for name, tensor in model.items()
        }
        groups = [
            [names.get(id(p), f"one of shape {tuple(p.shape)}") for p in group["params"]]
            for group in getattr(optimizer, "param_groups", ())
        ]
        cls = type(optimizer)
        return f"{cls.__module__}.{cls.__qualname__}", groups

    # ---- and back ----

    def look_at(self, index: io.BytesIO, data: Tensor) -> _tensors.Saved:
        """Reads the head; changes nothing.

        Raises:
            RuntimeError: the snapshot is of other models or optimizers; names what differs.
        """
        head = pickle.load(index)
        if head["format"] != FORMAT:
            raise RuntimeError(
                f"resume: the snapshot has format {head['format']}, this version reads {FORMAT}"
            )
        self._head = head
        models = [tensors_of(model) for model in self.models]
        faults: list[str] = []
        if len(models) != len(head["models"]):
            faults.append(f"it holds {len(head['models'])} models, there are {len(models)} now")
        for tensors, described in zip(models, head["models"], strict=False):
            faults += _faults_of(tensors, described)
        forms = [self._form_of(optimizer, models) for optimizer in self.optimizers]
        faults += _faults_of_optimizers(forms, head["optimizers"])
        if faults:
            more = f"; and {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else ""
            raise RuntimeError(
                f"resume: the snapshot is of something else: {'; '.join(faults[:_SHOWN])}{more}."
                " Build models and optimizers as the run did that took it; or, if this is another"
                " run, give it another name=, or remove what is there with"
                " `python -m fsdp_c snapshots --remove`"
            )
        return _tensors.Saved(data, head["sizes"], self._meshes(models))

    def install(self, index: io.BytesIO, saved: _tensors.Saved) -> None:
        """After `look_at`: all is as when the snapshot was taken, random numbers last."""
        rest = iter([_tensors.load(index, saved) for _ in range(len(self.optimizers) + 2)])
        for model, described in zip(self.models, self._head["models"], strict=True):
            tensors = tensors_of(model)
            for name, one in described.items():
                saved.copy_into(tensors[name], one)
        for optimizer in self.optimizers:
            _set_state(optimizer, next(rest))
        rng = next(rest)
        for key in next(rest):
            self._set_extra(key, _tensors.load(index, saved))
        _set_rng_states(rng)

    def _set_extra(self, key: str, kept: Any) -> None:
        how, value = kept
        if key not in self.extra:
            raise RuntimeError(f"resume: the snapshot has extra[{key!r}], which is missing now")
        if how == "state":
            self.extra[key].load_state_dict(value)
        elif how == "generator":
            self.extra[key].set_state(value)
        else:
            self.extra[key] = value


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """A model's shards, other parameters and buffers, by the names of its state dict. Local."""
    shards: dict[tuple[int, str], Tensor] = {}
    for module in model.modules():
        for group in _fsdp_init.groups_of(module):
            if getattr(group, "is_offloaded", False):
                raise RuntimeError("Snapshots: the model was moved away by offload()")
            for fsdp_param in group.fsdp_params:
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


def _described(tensors: dict[str, Tensor], pieces: _tensors.Pieces) -> dict[str, Any]:
    found = {name: pieces.describe(tensor) for name, tensor in tensors.items()}
    for name, one in found.items():
        if one is None:
            kind = f"{type(tensors[name]).__name__} of layout {tensors[name].layout}"
            where = " on the meta device" if tensors[name].is_meta else ""
            raise ValueError(f"Snapshots: '{name}' is a {kind}{where}, which cannot be kept")
    return found


def _dump(what: str, value: Any, file: io.BytesIO, pieces: _tensors.Pieces) -> None:
    try:
        _tensors.dump(value, file, pieces)
    except Exception as error:  # whatever an object of the user's raises
        raise ValueError(
            f"Snapshots: {what} cannot be pickled ({type(error).__name__}: {error}): give it a"
            " state_dict() and load_state_dict(), or leave it out"
        ) from error


# ---- optimizers ----


def _params_of(optimizer: Any) -> list[Tensor]:
    groups = getattr(optimizer, "param_groups", ())
    return [param for group in groups for param in group["params"]]


def _is_stock(optimizer: Any) -> bool:
    """Whether state and groups are all that it keeps, as torch.optim's own classes have it."""
    cls = type(optimizer)
    return (
        isinstance(optimizer, optim.Optimizer)
        and cls.state_dict is optim.Optimizer.state_dict
        and cls.load_state_dict is optim.Optimizer.load_state_dict
    )


def _state_of(optimizer: Any) -> Any:
    """Its state; of stock ones by the numbers of parameters, without torch's casts."""
    if not _is_stock(optimizer):
        return optimizer.state_dict()
    places = {id(param): place for place, param in enumerate(_params_of(optimizer))}
    state = [
        (places.get(id(key)), None if id(key) in places else key, value)
        for key, value in optimizer.state.items()
    ]
    groups = [
        {key: value for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]
    return state, groups


def _set_state(optimizer: Any, saved: Any) -> None:
    if not _is_stock(optimizer):
        optimizer.load_state_dict(saved)
        return
    state, groups = saved
    params = _params_of(optimizer)
    optimizer.state.clear()
    for place, key, value in state:
        optimizer.state[key if place is None else params[place]] = value
    for group, options in zip(optimizer.param_groups, groups, strict=True):
        for key, value in options.items():
            group[key] = value


def _faults_of_optimizers(now: Sequence[Any], saved: Sequence[Any]) -> Iterator[str]:
    if len(now) != len(saved):
        yield f"it holds {len(saved)} optimizers, there are {len(now)} now"
        return
    for at, ((cls, groups), (saved_cls, saved_groups)) in enumerate(zip(now, saved, strict=True)):
        if cls != saved_cls:
            yield f"optimizer {at} is a {cls} now, a {saved_cls} in the snapshot"
        elif groups != saved_groups:
            sizes = [[len(group) for group in all_of] for all_of in (groups, saved_groups)]
            odd = [n for one in groups for n in one if all(n not in s for s in saved_groups)]
            odd += [n for one in saved_groups for n in one if all(n not in s for s in groups)]
            named = f" ('{odd[0]}')" if odd else ""
            yield (
                f"optimizer {at} has groups of {sizes[0]} parameters now, of {sizes[1]} in the"
                f" snapshot{named}"
            )


def _faults_of(tensors: dict[str, Tensor], described: dict[str, Any]) -> Iterator[str]:
    for name in described.keys() - tensors.keys():
        yield f"'{name}' is in the snapshot alone"
    for name in tensors.keys() - described.keys():
        yield f"'{name}' is missing there"
    for name, tensor in tensors.items():
        if name in described and (fault := _tensors.misfit(tensor, described[name])):
            yield f"'{name}' {fault}"


# ---- random numbers and extra ----


def _rng_states() -> dict[str, Any]:
    states: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if "numpy" in sys.modules:
        states["numpy"] = sys.modules["numpy"].random.get_state()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state_all()
    return states


def _set_rng_states(states: dict[str, Any]) -> None:
    setters: dict[str, Callable[[Any], Any]] = {
        "python": random.setstate,
        "torch": torch.set_rng_state,
        "cuda": torch.cuda.set_rng_state_all,
    }
    if "numpy" in states:
        import numpy

        setters["numpy"] = numpy.random.set_state
    for name, state in states.items():
        setters[name](state)


def _kept_of(value: Any) -> tuple[str, Any]:
    if isinstance(value, torch.Generator):
        return "generator", value.get_state()
    if hasattr(value, "state_dict") and hasattr(value, "load_state_dict"):
        return "state", value.state_dict()
    return "value", value

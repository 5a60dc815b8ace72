"""What a snapshot is of: models, optimizers, random numbers and what else the user names."""

from __future__ import annotations

import functools
import io
import pickle
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn, optim
from torch.distributed.device_mesh import DeviceMesh

from fsdp_c._snapshots import _parts, _tensors

FORMAT = 1
_SHOWN = 3  # names in an error


class Packed(NamedTuple):
    """A snapshot before it is copied: tensors in order, and what they are."""

    index: bytes
    locals: list[Tensor]
    sources: list[Tensor]
    shown: list[Tensor]
    now: list[bool]
    watched: list[bool]

    def waiting(self) -> list[Tensor]:
        """Those that are read after the copy has begun."""
        return [shown for shown, waits in zip(self.shown, self.watched, strict=True) if waits]


class Opened(NamedTuple):
    """A snapshot that fits: its parts are read in order."""

    described: list[dict[str, Any]]  # tensors of models
    models: _tensors.Saved
    states: list[tuple[io.BytesIO, _tensors.Saved]]  # of optimizers
    rng: dict[str, Any]
    extra: dict[str, tuple[str, Any]]


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
        all_wait = all(map(_parts.calls_hooks, self.optimizers))
        self._models_part = _parts.ModelsPart(self.models, may_wait=all_wait)
        self._optimizer_parts = [
            _parts.OptimizerPart(optimizer, f"the state of optimizer {number}")
            for number, optimizer in enumerate(self.optimizers)
        ]
        self._n_written = 0
        self._meshes_then: list[DeviceMesh] = []  # when a part was packed last
        self._mesh_forms: list[Any] = []  # of these

    # ---- to a snapshot ----

    def pack(self, written: dict[int, Tensor]) -> Packed:
        """`written`: tensors that the program writes between its updates, by id.

        Raises:
            ValueError: something that cannot be kept, with its name.
        """
        if len(written) != self._n_written:
            self._n_written = len(written)
            self._forget()

        def make_pieces(may_wait: set[int]) -> _tensors.Pieces:
            self._meshes_then = self._meshes()
            self._mesh_forms = list(map(_mesh_form, self._meshes_then))
            return _tensors.Pieces(self._meshes_then, may_wait - written.keys())

        parts = [self._models_part.get(make_pieces)]
        for optimizer, part in zip(self.optimizers, self._optimizer_parts, strict=True):
            parts.append(part.get(make_pieces, functools.partial(self._kept_form_of, optimizer)))
        parts.append(_parts.pack(self._rest(), _tensors.Pieces(self._meshes_then, ())))
        head = {
            "format": FORMAT,
            "texts": [len(part.text) for part in parts],
            "sizes": [part.sizes for part in parts],
            "meshes": self._mesh_forms,
        }
        texts = [pickle.dumps(head), *(part.text for part in parts)]
        pieces = [part.pieces for part in parts]
        return Packed(
            b"".join(texts),
            [tensor for one in pieces for tensor in one.locals],
            [tensor for one in pieces for tensor in one.sources],
            [tensor for one in pieces for tensor in one.shown],
            [now for one in pieces for now in one.now],
            [watched for one in pieces for watched in one.watched],
        )

    def _forget(self) -> None:
        for part in (self._models_part, *self._optimizer_parts):
            part.drop()

    def _rest(self) -> Iterator[tuple[str, Any]]:
        yield "the states of random number generators", _rng_states()
        yield "the keys of extra", list(self.extra)
        for key, value in self.extra.items():
            yield f"extra[{key!r}]", _kept_of(value)

    def _meshes(self) -> list[DeviceMesh]:
        tensors = [t for model in self.models for t in _parts.tensors_of(model).values()]
        tensors += [param for one in self.optimizers for param in _parts.params_of(one)]
        return _parts.meshes_of(tensors)

    def _kept_form_of(self, optimizer: Any) -> Any:
        """`_form_of` it.

        Raises:
            ValueError: it steps what no model has, which nobody keeps.
        """
        if _parts.is_stock(optimizer):  # others may keep parameters in their own state
            known = {id(t) for model in self.models for t in _parts.tensors_of(model).values()}
            for param in _parts.params_of(optimizer):
                if id(param) not in known:
                    at = next(n for n, one in enumerate(self.optimizers) if one is optimizer)
                    raise ValueError(
                        f"Snapshots: optimizer {at} ({type(optimizer).__name__}) has a parameter of"
                        f" shape {tuple(param.shape)} that is in none of the models given, and its"
                        " values would not be kept: give its module, too (of a loose one an"
                        " nn.ParameterList), or the optimizer of these models"
                    )
        return self._form_of(optimizer)

    def _form_of(self, optimizer: Any) -> Any:
        """What has to be the same when it is loaded: the class, and names in groups."""
        names = {
            id(tensor): f"{at}.{name}" if len(self.models) > 1 else name
            for at, model in enumerate(self.models)
            for name, tensor in _parts.tensors_of(model).items()
        }
        groups = [
            [names.get(id(p), f"one of shape {tuple(p.shape)}") for p in group["params"]]
            for group in getattr(optimizer, "param_groups", ())
        ]
        cls = type(optimizer)
        return f"{cls.__module__}.{cls.__qualname__}", groups

    # ---- and back ----

    def look_at(self, index: bytes, data: Tensor) -> Opened:
        """Opens a snapshot; changes nothing.

        Raises:
            RuntimeError: it is of other models or optimizers; names what differs.
        """
        file = io.BytesIO(index)
        head = pickle.load(file)
        if head["format"] != FORMAT:
            raise RuntimeError(
                f"resume: the snapshot has format {head['format']}, this version reads {FORMAT}"
            )
        model, *states, rest = self._parts_of(file, data, head)
        described = _tensors.load(*model)
        forms = [pickle.loads(_tensors.load(*state)) for state in states]
        models = [_parts.tensors_of(model) for model in self.models]
        faults: list[str] = []
        meshes = list(map(_mesh_form, self._meshes()))
        if meshes != head.get("meshes", meshes):
            faults.append(
                f"its meshes are {_meshes_text(head['meshes'])}, and {_meshes_text(meshes)} now"
            )
        if len(models) != len(described):
            faults.append(f"it holds {len(described)} models, there are {len(models)} now")
        for tensors, saved in zip(models, described, strict=False):
            faults += _faults_of(tensors, saved)
        faults += _faults_of_optimizers([self._form_of(one) for one in self.optimizers], forms)
        rng, extra = _tensors.load(*rest), {}
        if not faults:  # its tensors may need the meshes
            extra = {key: _tensors.load(*rest) for key in _tensors.load(*rest)}
            faults += _faults_of_extra(self.extra, extra)
        if faults:
            more = f"; and {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else ""
            raise RuntimeError(
                f"resume: the snapshot is of something else: {'; '.join(faults[:_SHOWN])}{more}."
                " Build models, optimizers and extra as the run did that took it; or, if this is"
                " another run, give it another name=, or remove what is there with"
                " `python -m fsdp_c snapshots --remove`"
            )
        return Opened(described, model[1], states, rng, extra)

    def _parts_of(
        self, file: io.BytesIO, data: Tensor, head: dict[str, Any]
    ) -> Iterator[tuple[io.BytesIO, _tensors.Saved]]:
        meshes, at = self._meshes(), 0
        for n_bytes, sizes in zip(head["texts"], head["sizes"], strict=True):
            saved = _tensors.Saved(data[at:], sizes, meshes)
            yield io.BytesIO(file.read(n_bytes)), saved
            at += saved.n_bytes

    def install(self, opened: Opened) -> None:
        """All is as when the snapshot was taken, random numbers last."""
        for model, described in zip(self.models, opened.described, strict=True):
            tensors = _parts.tensors_of(model)
            for name, one in described.items():
                opened.models.copy_into(tensors[name], one)
        for optimizer, part in zip(self.optimizers, opened.states, strict=True):
            _parts.set_state(optimizer, _tensors.load(*part))
        for key, kept in opened.extra.items():
            self._set_extra(key, *kept)
        _set_rng_states(opened.rng)

    def _set_extra(self, key: str, how: str, value: Any) -> None:
        if how == "state":
            self.extra[key].load_state_dict(value)
        elif how == "generator":
            self.extra[key].set_state(value)
        else:
            self.extra[key] = value


# ---- what differs ----


def _mesh_form(mesh: DeviceMesh) -> Any:
    """Which rank is where: with another order it holds another shard."""
    return tuple(mesh.mesh.shape), mesh.mesh.flatten().tolist()


def _meshes_text(forms: Sequence[Any]) -> str:
    return ", ".join(f"{tuple(shape)} of ranks {ranks}" for shape, ranks in forms) or "none"


def models_of(given: Any) -> list[nn.Module]:
    """Raises TypeError unless it is a module, or several."""
    models = _listed("model", given, is_one=isinstance(given, nn.Module))
    for model in models:
        if not isinstance(model, nn.Module):
            hint = ": the model comes first, then its optimizer" if _has_state(model) else ""
            raise TypeError(f"Snapshots: model is a {type(model).__name__}, not a module{hint}")
    return models


def optimizers_of(given: Any) -> list[Any]:
    """Raises TypeError unless it is None, an optimizer, or several."""
    optimizers = _listed("optimizer", () if given is None else given, is_one=_has_state(given))
    for optimizer in optimizers:
        kind = type(optimizer).__name__
        if isinstance(optimizer, type):
            raise TypeError(f"Snapshots: optimizer is the class {optimizer.__name__}, not one made")
        if isinstance(optimizer, nn.Module):
            raise TypeError(
                f"Snapshots: optimizer is a {kind}, a module: several modules are given first, as a"
                " list"
            )
        if isinstance(optimizer, optim.lr_scheduler.LRScheduler):
            raise TypeError(
                f"Snapshots: optimizer is a {kind}, a scheduler: give the optimizer here, and"
                " schedulers in extra={'scheduler': ...}"
            )
        if not _has_state(optimizer):
            raise TypeError(
                f"Snapshots: optimizer is a {kind} without state_dict and load_state_dict"
            )
    return optimizers


def _listed(what: str, given: Any, is_one: bool) -> list[Any]:
    if is_one:
        return [given]
    is_list = isinstance(given, Iterable) and not isinstance(given, (str, Mapping))
    return list(given) if is_list else [given]


def _has_state(value: Any) -> bool:
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def check_extra(extra: Any) -> None:
    """Raises TypeError unless it is a dict by names, or None."""
    if extra is not None and not isinstance(extra, MutableMapping):
        raise TypeError(f"Snapshots: extra is a {type(extra).__name__}, not a dict by names")
    for key in extra or ():
        if not isinstance(key, str):
            raise TypeError(f"Snapshots: extra has the key {key!r}, which is no name")


def _faults_of(tensors: dict[str, Tensor], described: dict[str, Any]) -> Iterator[str]:
    for name in described.keys() - tensors.keys():
        yield f"'{name}' is in the snapshot alone"
    for name in tensors.keys() - described.keys():
        yield f"'{name}' is missing there"
    for name, tensor in tensors.items():
        if name in described and (fault := _tensors.misfit(tensor, described[name])):
            yield f"'{name}' {fault}"


def _faults_of_optimizers(now: Sequence[Any], saved: Sequence[Any]) -> Iterator[str]:
    if len(now) != len(saved):
        yield f"it holds {len(saved)} optimizers, there are {len(now)} now"
        return
    for at, ((cls, groups), (saved_cls, saved_groups)) in enumerate(zip(now, saved, strict=True)):
        if cls != saved_cls:
            yield f"optimizer {at} is a {cls} now, a {saved_cls} in the snapshot"
        elif groups != saved_groups:
            sizes = [[len(group) for group in all_of] for all_of in (groups, saved_groups)]
            names, saved_names = ({n for g in one for n in g} for one in (groups, saved_groups))
            odd = sorted(names ^ saved_names)
            named = f" ('{odd[0]}' in one of them alone)" if odd else ""
            yield (
                f"optimizer {at} has groups of {sizes[0]} parameters now, of {sizes[1]} in the"
                f" snapshot{named}"
            )


def _faults_of_extra(now: MutableMapping[str, Any], saved: dict[str, Any]) -> Iterator[str]:
    for key in saved.keys() - now.keys():
        yield f"extra[{key!r}] is in the snapshot alone"
    for key, value in now.items():
        if key not in saved:
            yield f"extra[{key!r}] is missing there"
        elif (kind := _kind_of(value)) != saved[key][0]:
            yield f"extra[{key!r}] is {_KINDS[kind]} now, {_KINDS[saved[key][0]]} in the snapshot"


# ---- random numbers and extra ----

_KINDS = {
    "generator": "a torch.Generator",
    "state": "an object with load_state_dict()",
    "value": "a value",
}


def _rng_states() -> dict[str, Any]:
    states: dict[str, Any] = {"torch": torch.get_rng_state()}
    states["python"] = pickle.dumps(random.getstate())  # 625 numbers at once
    if "numpy" in sys.modules:
        states["numpy"] = pickle.dumps(sys.modules["numpy"].random.get_state())
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state_all()
    return states


def _set_rng_states(states: dict[str, Any]) -> None:
    setters: dict[str, Callable[[Any], Any]] = {
        "python": lambda state: random.setstate(pickle.loads(state)),
        "torch": torch.set_rng_state,
        "cuda": torch.cuda.set_rng_state_all,
    }
    if "numpy" in states:
        import numpy

        setters["numpy"] = lambda state: numpy.random.set_state(pickle.loads(state))
    for name, state in states.items():
        setters[name](state)


def _kind_of(value: Any) -> str:
    if isinstance(value, torch.Generator):
        return "generator"
    return "state" if _has_state(value) else "value"


def _kept_of(value: Any) -> tuple[str, Any]:
    kind = _kind_of(value)
    if kind == "generator":
        return kind, value.get_state()
    return kind, value.state_dict() if kind == "state" else value

"""A model's shards in files that each rank writes for itself, readable at any world size.

A folder holds a safetensors file per rank and `manifest.json`, which says where in them each part
of each whole tensor lies. A dump counts from when the manifest is replaced: files have the number
of the dump in their names, and those of the dump before stay until then.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from fsdp_c._checkpoint import _full, _safetensors
from fsdp_c._checkpoint._full import IncompatibleKeys
from fsdp_c._comm import _communicator, _dtensor_chunks
from fsdp_c._fully_shard import _fqns

_MANIFEST = "manifest.json"
_FORMAT = 1
_PLAIN = (bool, int, float, str, type(None))


@torch.no_grad()
def save_shards(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    optimizer: torch.optim.Optimizer | None = None,
    extra: Any = None,
) -> None:
    """Writes this rank's shards, buffers and optimizer state into a folder that all ranks see.

    Nothing is gathered; of copies (HSDP, replicated tensors) one rank writes. A dump that was there
    is replaced at once when all ranks are done, and stays whole if anything fails before.
    Collective: two barriers.

    Args:
        optimizer: its state and options are saved too, by parameter names.
        extra: anything that JSON holds (a step number, ...); `load_shards` returns rank 0's.

    Raises:
        ValueError: something that cannot be saved; names it.
        OSError: the folder cannot be written.

    Examples:
        >>> fsdp_c.save_shards(model, folder, optimizer=optimizer, extra={"step": 3})
    """
    folder = Path(folder)
    entries = {named.names[0]: named for named in _fqns.tensors_of(model)}
    tensors = {name: named.tensor for name, named in entries.items()}
    options: Any = None
    if optimizer is not None:
        state, options = _optimizer_state(optimizer, tensors)
        tensors |= state
    group, ranks = _group_of(tensors)
    rank = group.rank() if group is not None else 0
    folder.mkdir(parents=True, exist_ok=True)
    number = _read_manifest(folder)["number"] + 1 if (folder / _MANIFEST).exists() else 1
    own: dict[str, torch.Tensor] = {}
    listed: dict[str, Any] = {}
    for name, tensor in tensors.items():
        pieces = []
        for at, (holder, box) in enumerate(_holders(name, tensor, ranks)):
            key = f"{name}#{at}"
            pieces.append([_file_name(number, holder), key, [[p.start, p.stop] for p in box]])
            if holder == rank:
                own[key] = _full.local_part(tensor)
        dtype = _safetensors.name_of(tensor.dtype, f"save_shards: '{name}'")
        listed[name] = {"shape": list(tensor.shape), "dtype": dtype, "pieces": pieces}
    manifest = {
        "format": _FORMAT,
        "number": number,
        "names": {alias: name for name, named in entries.items() for alias in named.names[1:]},
        "tensors": listed,
        "optimizer": options,
        "extra": extra,
    }
    text = json.dumps(manifest)  # what cannot be written is found before anything is
    _safetensors.write(folder / _file_name(number, rank), own, checksums=True)
    _commit(folder, group, text, number)


def _commit(folder: Path, group: dist.ProcessGroup | None, text: str, number: int) -> None:
    """The manifest, once all ranks have written; then the files of older dumps go."""
    _wait(group)
    if group is None or group.rank() == 0:
        temporary = folder / f"{_MANIFEST}.new"
        with temporary.open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(folder / _MANIFEST)
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        for path in folder.glob("dump-*-rank-*.safetensors"):
            if not path.name.startswith(f"dump-{number}-"):
                path.unlink()
    _wait(group)


def _wait(group: dist.ProcessGroup | None) -> None:
    if group is not None:
        _communicator.communicator_for(group).barrier()


def _file_name(number: int, rank: int) -> str:
    return f"dump-{number}-rank-{rank}.safetensors"


def _read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / _MANIFEST
    try:
        manifest = json.loads(path.read_text())
    except FileNotFoundError:
        raise ValueError(f"{folder} has no complete dump: there is no {_MANIFEST}") from None
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from None
    if manifest.get("format") != _FORMAT:
        raise ValueError(
            f"{path} has format {manifest.get('format')}, this version reads {_FORMAT}"
        )
    return manifest


def _group_of(
    tensors: dict[str, torch.Tensor],
) -> tuple[dist.ProcessGroup | None, tuple[int, ...]]:
    """The ranks that hold the model: those of the largest mesh."""
    meshes = {t.device_mesh for t in tensors.values() if isinstance(t, DTensor)}
    if meshes:
        return _dtensor_chunks.group_of(max(meshes, key=lambda mesh: mesh.size()))
    return (dist.group.WORLD if dist.is_initialized() else None), ()


def _holders(
    name: str, tensor: torch.Tensor, ranks: tuple[int, ...]
) -> Iterator[tuple[int, _dtensor_chunks.Box]]:
    """Which rank of the group writes which part: each part once."""
    if not isinstance(tensor, DTensor):
        yield 0, tuple(slice(0, n) for n in tensor.shape)
        return
    mesh = tensor.device_mesh
    if mesh.size() != len(ranks):
        raise ValueError(
            f"save_shards: '{name}' is on {mesh}, other tensors of the model on a larger mesh"
        )
    try:
        boxes = _dtensor_chunks.tensor_boxes(tensor)
    except ValueError as error:
        raise ValueError(f"save_shards: '{name}': {error}") from None
    places = itertools.product(*(range(n) for n in mesh.shape))
    for place, rank, box in zip(places, ranks, boxes, strict=True):
        pairs = zip(place, tensor.placements, strict=True)
        is_first = not any(at for at, placed in pairs if isinstance(placed, Replicate))
        if is_first and (_dtensor_chunks.box_numel(box) or not tensor.numel()):
            yield rank, box


# ---- optimizers: tensors by name, everything else as JSON ----


def _names_by_param(tensors: dict[str, torch.Tensor]) -> dict[int, str]:
    return {id(tensor): name for name, tensor in tensors.items()}


def _optimizer_state(
    optimizer: torch.optim.Optimizer, tensors: dict[str, torch.Tensor]
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Its tensors, by "optimizer/<parameter>/<key>", and the rest."""
    names = _names_by_param(tensors)
    found: dict[str, torch.Tensor] = {}
    plain: dict[str, dict[str, Any]] = {}
    for param, state in optimizer.state.items():
        name = _name_of(param, names)
        for key, value in state.items():
            where = f"state '{key}' of parameter '{name}'"
            if isinstance(value, torch.Tensor):
                found[_key(name, key)] = value
                value = None
            plain.setdefault(name, {})[key] = _checked(value, where)
    groups = []
    for group in optimizer.param_groups:
        options = {
            key: _checked(value, f"option '{key}'")
            for key, value in group.items()
            if key != "params"
        }
        groups.append({**options, "params": [_name_of(p, names) for p in group["params"]]})
    return found, {"state": plain, "groups": groups}


def _key(name: str, key: str) -> str:
    return f"optimizer/{name}/{key}"


def _name_of(param: torch.Tensor, names: dict[int, str]) -> str:
    if id(param) not in names:
        raise ValueError(
            f"the optimizer holds a parameter of shape {tuple(param.shape)} that the model lacks:"
            " make the optimizer after fully_shard"
        )
    return names[id(param)]


def _checked(value: Any, what: str) -> Any:
    if isinstance(value, torch.Tensor):  # an option, such as a learning rate
        if value.numel() == 1 and not isinstance(value, DTensor):
            dtype = _safetensors.name_of(value.dtype, f"save_shards: {what}")
            return {"tensor": value.item(), "dtype": dtype}
    elif isinstance(value, _PLAIN):
        return value
    elif isinstance(value, (list, tuple)) and all(isinstance(item, _PLAIN) for item in value):
        return list(value)
    raise ValueError(
        f"save_shards: {what} of the optimizer is a {type(value).__name__}, which a dump cannot"
        " hold: use torch.distributed.checkpoint"
    )


@torch.no_grad()
def load_shards(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    optimizer: torch.optim.Optimizer | None = None,
    strict: bool = True,
    cast: bool = False,
    verify: bool = True,
) -> tuple[IncompatibleKeys, Any]:
    """Reads a dump of `save_shards` into this rank's shards, at any world size and on any mesh.

    Files are mapped; a rank reads the parts that overlap its own. Nothing is written before
    everything is known to fit and to be undamaged. Local: no collective.

    Args:
        model: as for `load_full`.
        optimizer: made over the model's sharded parameters; gets the saved state and options.
        strict, cast: as for `load_full`.
        verify: compares the checksums of the parts that it reads, about a second per GB.

    Returns:
        ``((missing_keys, unexpected_keys), extra)``.

    Raises:
        RuntimeError: names, shapes or dtypes that do not fit, all of them in one message.
        ValueError: no complete dump is there, a part of it is damaged, or it has no state for the
            optimizer.

    Examples:
        >>> fsdp_c.save_shards(model, folder, optimizer=optimizer, extra={"step": 3})
        >>> keys, extra = fsdp_c.load_shards(model, folder, optimizer=optimizer)
        >>> print(extra["step"])
    """
    folder = Path(folder)
    manifest = _read_manifest(folder)
    stored = dict(_stored(folder, manifest, verify))
    weights = {name: value for name, value in stored.items() if not _is_of_optimizer(name)}
    weights |= {alias: weights[name] for alias, name in manifest["names"].items()}
    install: Callable[[], None] | None = None
    if optimizer is not None:
        install = _prepared(model, optimizer, manifest, stored)
    keys = _full.fill(model, weights, "load_shards", strict=strict, cast=cast)
    if install is not None:
        install()
    return keys, manifest["extra"]


def _is_of_optimizer(name: str) -> bool:
    return name.startswith("optimizer/")


def _stored(
    folder: Path, manifest: dict[str, Any], verify: bool
) -> Iterator[tuple[str, _full.Stored]]:
    files: dict[str, dict[str, _safetensors.Entry]] = {}
    looked_at: set[tuple[str, str]] = set()

    def get(file: str, key: str) -> torch.Tensor:
        if file not in files:
            files[file] = _safetensors.read(folder / file)
        entry = files[file][key]
        if verify and (file, key) not in looked_at:
            if not entry.is_intact:
                raise ValueError(
                    f"{folder / file} is damaged: the bytes of '{key}' are not those that were"
                    " written. Nothing was loaded; take another dump, or read what is there with"
                    " verify=False"
                )
            looked_at.add((file, key))
        return entry.tensor()

    for name, entry in manifest["tensors"].items():
        pieces = [
            (tuple(slice(*part) for part in box), lambda file=file, key=key: get(file, key))
            for file, key, box in entry["pieces"]
        ]
        for file, _, _ in entry["pieces"]:
            if file not in files and not (folder / file).exists():
                raise ValueError(f"{folder} is damaged: {file} is missing")
        dtype = _safetensors.DTYPES[entry["dtype"]]
        yield name, _full.Stored(tuple(entry["shape"]), dtype, pieces)


def _prepared(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    manifest: dict[str, Any],
    stored: dict[str, _full.Stored],
) -> Callable[[], None]:
    """Checks that the state fits the optimizer; what it returns reads and installs it."""
    saved = manifest["optimizer"]
    if saved is None:
        raise ValueError("load_shards: the dump was written without an optimizer")
    aliases: dict[str, str] = manifest["names"]
    names: dict[int, str] = {}
    for named in _fqns.tensors_of(model):
        names[id(named.tensor)] = aliases.get(named.names[0], named.names[0])
    groups = [[_name_of(p, names) for p in group["params"]] for group in optimizer.param_groups]
    if groups != [group["params"] for group in saved["groups"]]:
        raise ValueError(
            "load_shards: the optimizer has other groups of parameters than the one that was saved:"
            f" {_sizes(groups)}, saved {_sizes([g['params'] for g in saved['groups']])}"
        )
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for name, param in zip(sum(groups, []), params, strict=True):
        for key in saved["state"].get(name, ()):
            if source := stored.get(_key(name, key)):
                _full.look_at(_target_of(param, source, "meta"), source)

    def install() -> None:
        state = optimizer.state_dict()
        state["state"] = {
            index: {
                key: _restored(_key(name, key), value, param, stored)
                for key, value in saved["state"][name].items()
            }
            for index, (name, param) in enumerate(zip(sum(groups, []), params, strict=True))
            if name in saved["state"]
        }
        for group, options in zip(state["param_groups"], saved["groups"], strict=True):
            for key, value in options.items():
                if key != "params":
                    group[key] = _option(value, group.get(key))
        optimizer.load_state_dict(state)

    return install


def _sizes(groups: list[list[str]]) -> str:
    return f"{len(groups)} of {', '.join(str(len(group)) for group in groups)} parameters"


def _option(value: Any, like: Any) -> Any:
    if isinstance(value, dict):
        return torch.tensor(value["tensor"], dtype=_safetensors.DTYPES[value["dtype"]])
    return tuple(value) if isinstance(like, tuple) else value


def _restored(key: str, value: Any, param: torch.Tensor, stored: dict[str, _full.Stored]) -> Any:
    if key not in stored:
        return value
    target = _target_of(param, stored[key], "cpu")
    _full.copy_into(target, stored[key])
    return target


def _target_of(param: torch.Tensor, source: _full.Stored, device: str) -> torch.Tensor:
    """A state of the parameter's shape is sharded as that is, any other is whole."""
    if isinstance(param, DTensor) and source.shape == tuple(param.shape):
        return torch.empty_like(param, dtype=source.dtype, device=device, requires_grad=False)
    return torch.empty(source.shape, dtype=source.dtype, device=device)

"""Tensors as pieces of memory and words that tell what they are; pickles with tensors set apart."""

from __future__ import annotations

import io
import pickle
from collections.abc import Container, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

ALIGN = 64  # FC_ALIGN: where pieces begin
_SMALL = 1 << 16  # what is copied at once, rather than watched until it is copied


class Plain(NamedTuple):
    """A strided tensor: a piece of memory, elements in the order of their strides."""

    piece: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    device: str
    requires_grad: bool


class Sharded(NamedTuple):
    """A DTensor."""

    mesh: int  # among those of the model
    placements: tuple[Any, ...]
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    requires_grad: bool
    local: Any


class Wrapped(NamedTuple):
    """Another subclass that says which tensors it is made of."""

    cls: type
    context: Any
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    inner: dict[str, Any]


class Pieces:
    """Memory to copy, in order."""

    def __init__(self, meshes: Sequence[DeviceMesh], may_wait: Container[int]) -> None:
        """`may_wait`: ids of tensors that stay as they are until the next update."""
        self.meshes = list(meshes)
        self.locals: list[Tensor] = []  # on the host
        self.sources: list[Tensor] = []  # what is copied there first; else the same
        self.shown: list[Tensor] = []  # whose they are: as users hold them
        self.now: list[bool] = []
        self.watched: list[bool] = []  # must not change until they are copied
        self.changes_unseen = False  # has what its tensors' identity and layout do not tell
        self.dtensors: list[tuple[DTensor, Tensor]] = []  # with their local tensors
        self._may_wait = may_wait
        self._known: dict[int, Any] = {}  # by id of what is shown, which `shown` keeps

    @property
    def sizes(self) -> list[int]:
        return [local.numel() * local.itemsize for local in self.locals]

    def describe(self, tensor: Tensor) -> Any:
        """Takes its memory; None: it is of a kind that pickle has to take."""
        if id(tensor) not in self._known:
            self._known[id(tensor)] = self._described(tensor, tensor)
            self.changes_unseen |= self._known[id(tensor)] is None
        return self._known[id(tensor)]

    def _described(self, tensor: Tensor, shown: Tensor) -> Any:
        if isinstance(tensor, DTensor):
            local = self._described(tensor._local_tensor, shown)
            spec = tuple(tensor.placements), tuple(tensor.shape), tuple(tensor.stride())
            mesh = self._mesh_of(tensor)
            self.dtensors.append((tensor, tensor._local_tensor))
            return local and Sharded(mesh, *spec, tensor.requires_grad, local)
        if _is_wrapper(tensor):
            wrapper: Any = tensor
            self.changes_unseen = True  # it may hold other parts then, and words about them
            names, context = wrapper.__tensor_flatten__()
            parts = {name: self._described(getattr(tensor, name), shown) for name in names}
            spec = tuple(tensor.shape), tuple(tensor.stride())
            return None if None in parts.values() else Wrapped(type(tensor), context, *spec, parts)
        if type(tensor) not in (Tensor, nn.Parameter, nn.Buffer) or tensor.layout != torch.strided:
            return None
        if tensor.is_quantized or tensor.is_meta:
            return None
        return self._take(tensor, shown)

    def _mesh_of(self, tensor: DTensor) -> int:
        if tensor.device_mesh not in self.meshes:
            raise ValueError(
                f"Snapshots: a DTensor of shape {tuple(tensor.shape)} is on {tensor.device_mesh},"
                " on which the model has no parameters: keep what it stands for in another form"
            )
        return self.meshes.index(tensor.device_mesh)

    def _take(self, tensor: Tensor, shown: Tensor) -> Plain:
        may_wait = id(shown) in self._may_wait and not tensor.is_inference()
        local = source = tensor
        if not tensor.is_cpu:
            local = _host_memory(tensor)
            now, watched = False, may_wait
        else:
            if tensor.is_conj() or tensor.is_neg() or not _is_dense(tensor):
                self.changes_unseen, may_wait = True, False  # copied here, and again each time
                local = source = tensor.detach().contiguous().resolve_conj().resolve_neg()
            now = not may_wait or local.numel() * local.itemsize < _SMALL
            watched = not now
        self.locals.append(local)
        self.sources.append(source)
        self.shown.append(shown)
        self.now.append(now)
        self.watched.append(watched)
        return Plain(
            len(self.locals) - 1,
            local.dtype,
            tuple(local.shape),
            tuple(local.stride()),
            str(tensor.device),
            tensor.requires_grad,
        )


def _host_memory(tensor: Tensor) -> Tensor:
    """Where a device's tensor is copied to: pinned, so that nobody waits, where there is that."""
    shape = tuple(tensor.shape)
    stride = tensor.stride() if _is_dense(tensor) else torch.empty(shape, device="meta").stride()
    try:
        return torch.empty_strided(shape, stride, dtype=tensor.dtype, pin_memory=True)
    except RuntimeError:
        return torch.empty_strided(shape, stride, dtype=tensor.dtype)


def _is_wrapper(tensor: Tensor) -> bool:
    """Whether it is of a class that can be taken apart, and put together again."""
    cls = type(tensor)
    return hasattr(cls, "__tensor_flatten__") and hasattr(cls, "__tensor_unflatten__")


def _is_dense(tensor: Tensor) -> bool:
    """Whether its elements fill a piece of memory, each once, in whichever order."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


# ---- and back ----


class Saved:
    """The data of a snapshot: tensors from what describes them."""

    def __init__(self, data: Tensor, sizes: Sequence[int], meshes: Sequence[DeviceMesh]) -> None:
        """`data`: bytes, which stay as long as tensors that were not copied."""
        self.data = data
        self.meshes = meshes
        self._sizes = sizes
        self._places = []
        at = 0
        for size in sizes:
            self._places.append(at)
            at += -(-size // ALIGN) * ALIGN
        self.n_bytes = at

    def view(self, plain: Plain) -> Tensor:
        """The bytes themselves, on the host."""
        at, size = self._places[plain.piece], self._sizes[plain.piece]
        flat = self.data[at : at + size].view(plain.dtype)
        return flat.as_strided(plain.shape, plain.stride)

    def tensor(self, described: Any) -> Tensor:
        """One of its own memory."""
        if isinstance(described, Plain):
            made = self.view(described).to(described.device, copy=True)
            return made.requires_grad_() if described.requires_grad else made
        if isinstance(described, Sharded):
            return self._sharded(described)
        inner = {name: self.tensor(part) for name, part in described.inner.items()}
        rebuild: Any = described.cls
        return rebuild.__tensor_unflatten__(
            inner, described.context, torch.Size(described.shape), described.stride
        )

    def _sharded(self, described: Sharded) -> Tensor:
        made = DTensor.from_local(
            self.tensor(described.local),
            self.meshes[described.mesh],
            described.placements,
            run_check=False,
            shape=torch.Size(described.shape),
            stride=described.stride,
        ).detach()
        return made.requires_grad_() if described.requires_grad else made

    @torch.no_grad()
    def copy_into(self, tensor: Tensor, described: Any) -> None:
        """Into a tensor that `misfit` has nothing to say about."""
        if isinstance(described, Plain):
            tensor.detach().copy_(self.view(described))
        elif isinstance(described, Sharded):
            assert isinstance(tensor, DTensor)
            self.copy_into(tensor._local_tensor, described.local)
        else:
            for name, part in described.inner.items():
                self.copy_into(getattr(tensor, name), part)


def misfit(tensor: Tensor, described: Any) -> str:
    """What of the tensor is not as in the snapshot, in words; empty if it fits."""
    if isinstance(described, Sharded):
        if not isinstance(tensor, DTensor):
            return "is not sharded now"
        if tuple(tensor.shape) != described.shape:
            return f"has shape {tuple(tensor.shape)} now, {described.shape} in the snapshot"
        if tuple(tensor.placements) != described.placements:
            return f"is placed as {tensor.placements} now, as {described.placements} there"
        return misfit(tensor._local_tensor, described.local)
    if isinstance(tensor, DTensor):
        return "is sharded now, and is not in the snapshot"
    if isinstance(described, Wrapped):
        if type(tensor) is not described.cls:
            return f"is a {type(tensor).__name__} now, a {described.cls.__name__} in the snapshot"
        parts = [misfit(getattr(tensor, name), part) for name, part in described.inner.items()]
        return next(filter(None, parts), "")
    if _is_wrapper(tensor):
        return f"is a {type(tensor).__name__} now, a plain tensor in the snapshot"
    if tensor.is_meta:
        return "is on the meta device: materialize the model before resume()"
    if tuple(tensor.shape) != described.shape:
        return f"has shape {tuple(tensor.shape)} now, {described.shape} in the snapshot"
    if tensor.dtype != described.dtype:
        return f"is {tensor.dtype} now, {described.dtype} in the snapshot"
    return ""


# ---- pickles ----


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, pieces: Pieces) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._pieces = pieces

    def persistent_id(self, obj: Any) -> Any:
        return self._pieces.describe(obj) if isinstance(obj, Tensor) else None


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, saved: Saved) -> None:
        super().__init__(file)
        self._saved = saved

    def persistent_load(self, pid: Any) -> Tensor:
        return self._saved.tensor(pid)


def dump(value: Any, file: io.BytesIO, pieces: Pieces) -> None:
    """Appends a pickle whose tensors are pieces."""
    _Pickler(file, pieces).dump(value)


def load(file: io.BytesIO, saved: Saved) -> Any:
    """The next one; its tensors have memory of their own."""
    return _Unpickler(file, saved).load()

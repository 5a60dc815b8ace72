"""A parameter of which Python makes what is gathered: an extension's, or without memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.distributed.tensor import Shard

from fsdp_c._compat import _versions
from fsdp_c._fully_shard import _all_gather_extension
from fsdp_c._fully_shard._param_attributes import copy_attributes
from fsdp_c._fully_shard._param_layout import ParamLayout, outside_of_inference
from fsdp_c._fully_shard._param_spec import ParamSpec


class ExtendedParam(ParamLayout):
    """What the core asks of Python for each gather of such a parameter.

    An extension's inputs are gathered in the parameter's place, and its second method makes the
    whole parameter of what came. A shard without memory (a tensor around others) is copied to
    plain memory, as torch does, and gathered from there.
    """

    inputs: Sequence[Tensor] = ()  # of an extension; their sizes and dtypes are what counts
    _next: tuple[list[Tensor], Any] | None = None  # what set-up has asked for already
    _next_of: tuple[int, int] | None = None  # versions of the shard then: a step or load may follow
    _metadata: Any = None  # of the last gather
    _whole_sizes: Sequence[tuple[int, ...]] = ()  # in which all ranks' inputs are given back

    @property
    def has_extension(self) -> bool:
        return hasattr(self._sharded_local_tensor, "fsdp_pre_all_gather")

    @property
    def is_extended(self) -> bool:
        local = self._sharded_local_tensor
        return self.has_extension or not (
            type(local) is Tensor or _has_memory(self._sharded_param_data)
        )

    # ---- set-up ----

    def lay_out(self) -> None:
        """Finds out what an extension's inputs are; collective over the ranks of the shards."""
        self.inputs, self._next = (), None
        if not self.has_extension:
            return
        self.inputs_agree = False
        with torch.no_grad(), outside_of_inference():
            self._next, self._next_of = _all_gather_extension.ask(self), self._shard_versions()
        self.inputs = [tensor.to("meta") for tensor in self._next[0]]
        self._whole_sizes = [(-1, *tensor.size()[1:]) for tensor in self.inputs]

    def _shard_versions(self) -> tuple[int, int]:
        return self.sharded_param._version, self._sharded_local_tensor._version

    def renew_outputs(self) -> list[Tensor]:
        """Where an extension's inputs are gathered: the first gather makes a whole parameter."""
        self.forget_whole()
        self.all_gather_outputs = [
            torch.empty(self._n_shards * tensor.numel(), dtype=tensor.dtype, device=self.device)
            for tensor in self.inputs
        ]
        return self.all_gather_outputs

    def forget_whole(self) -> None:
        self.__dict__.pop("_unsharded_param", None)
        self._unsharded_inner_tensors = []
        self.all_gather_outputs = []

    @property
    def _n_shards(self) -> int:
        return getattr(self.mesh_info, "shard_mesh_size", 1)

    def input_specs(self) -> list[ParamSpec]:
        """Each rank's chunk of an input is a row; of another dim than 0 it is the parameter's."""
        dim = getattr(self.fsdp_placement, "dim", 0)
        rows = [
            self.geometry() if dim > 0 else (1, self._n_shards, tensor.numel())
            for tensor in self.inputs
        ]
        return [
            ParamSpec(*row, *(4 * (tensor.dtype,)), has_grad=False, trainable=False, is_made=True)
            for row, tensor in zip(rows, self.inputs, strict=True)
        ]

    def stand_in(self) -> torch.nn.Parameter:
        """For the unsharded parameter, which the first gather makes."""
        dtype = _versions.compute_dtype(self)
        whole = torch.empty(self._orig_size, dtype=dtype, device=self.device)
        whole.untyped_storage().resize_(0)
        param = torch.nn.Parameter(whole, requires_grad=self.sharded_param.requires_grad)
        _versions.set_grad_dtype(self, param)
        return param

    def check_post_forward(self) -> None:
        """NotImplementedError at set-up for what torch's class finds out in mid-step."""
        if self.is_dtensor or self.has_extension:
            has_extension = self.has_extension
            what = "has an all-gather extension" if has_extension else "is a DTensor of its own"
            raise NotImplementedError(
                f"reshard_after_forward is an int, and parameter '{self._param_fqn}' {what}, which"
                " cannot be resharded to a smaller mesh: pass True or False"
            )

    def _init_extensions(self) -> None:
        inner = self.__dict__.get("_unsharded_inner_tensors")
        super()._init_extensions()
        if inner and hasattr(self, "_unsharded_param"):
            self._unsharded_inner_tensors = inner  # of what was gathered before

    # ---- called by the core ----

    def make_inputs(self) -> Sequence[Tensor]:
        """This rank's part of the next gather; without gradients."""
        if self.has_extension != bool(self.inputs):
            raise RuntimeError(
                f"parameter '{self._name}' has {'an' if self.has_extension else 'no'} all-gather"
                " extension now, other than in its first gather: attach it before the first"
                " forward, and keep it"
            )
        if not self.inputs:
            local = self._sharded_local_tensor
            return [torch.empty(local.size(), dtype=local.dtype, device=self.device).copy_(local)]
        if self._next is None or self._next_of != self._shard_versions():
            inputs, metadata = _all_gather_extension.ask(self)
            _all_gather_extension.check_alike(self, inputs)
        else:
            inputs, metadata = self._next
        self._next = None
        self._metadata = metadata
        return inputs

    def fill_unsharded(self) -> torch.nn.Parameter:
        """Makes the unsharded parameter of what was gathered, or writes to the one that is."""
        whole = self.__dict__.get("_unsharded_param")
        if whole is None:
            self._extensions_data.all_gather_metadata = self._metadata
            self._extensions_data.all_gather_input_sizes = [tensor.size() for tensor in self.inputs]
            # What the user's code computes is no part of the model's graph.
            with torch.no_grad(), outside_of_inference():
                self.init_unsharded_param()
            copy_attributes(self.sharded_param, self._unsharded_param)
            return self._unsharded_param
        for tensor in self._unsharded_inner_tensors:
            _fsdp_param.alloc_storage(tensor)
        with self._explained():
            self._sharded_local_tensor.fsdp_post_all_gather(
                tuple(map(Tensor.view, self.all_gather_outputs, self._whole_sizes)),
                self._metadata,
                _versions.compute_dtype(self),
                out=whole,
            )
        if hasattr(self, "_release_all_gather_outputs_if_needed"):  # from torch 2.15
            self._release_all_gather_outputs_if_needed()
        return whole

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """While an extension fills a whole parameter: an error says what may be the matter."""
        try:
            yield
        except RuntimeError as error:
            if self.fsdp_placement != Shard(0):
                raise
            rows = self._orig_size[0]
            padded = self.padded_sharded_param_size[0] * self._n_shards
            if padded == rows:
                raise
            raise RuntimeError(
                f"{error}\nThis was raised by fsdp_post_all_gather of parameter '{self._name}',"
                f" which has {rows} rows, as has `out`, while the gathered tensors have {padded},"
                " the last of them padding: narrow them to the rows of `out`"
            ) from error


def _has_memory(padded: Tensor) -> bool:
    """False for wrappers, whose numbers are those of other tensors. Padded shards are alike."""
    try:
        storage = padded.untyped_storage()
        return storage.nbytes() >= padded.numel() * padded.itemsize and storage.data_ptr() != 0
    except (NotImplementedError, RuntimeError):
        return False

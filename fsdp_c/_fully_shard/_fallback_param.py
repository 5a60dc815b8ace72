"""One parameter on the fallback: torch's FSDPParam, mended."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo
from torch.distributed.fsdp._fully_shard._fsdp_param import ShardedState
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from fsdp_c import _env
from fsdp_c._compat import _versions
from fsdp_c._fully_shard import _all_gather_extension, _step_messages
from fsdp_c._fully_shard._param_attributes import copy_attributes
from fsdp_c._fully_shard._param_layout import ParamLayout, strides_for


class FallbackParam(ParamLayout):
    """What torch's own class leaves undone where its implementation runs the parameter."""

    _was_trained = False  # the unsharded parameter, when it was registered
    _known_local: Tensor | None = None  # the shard that the last gather has read
    _inputs: Sequence[Tensor] = ()  # of the all-gather that is being made
    _is_alias = False  # what is gathered is the shard's own memory
    # A gradient of micro-batches, while there is no unsharded parameter that has it.
    _accumulated_grad: Tensor | None = None
    is_recast = False  # the shard's dtype has changed since set-up

    # ---- transitions ----

    def is_replaced(self) -> bool:
        """Whether the shard is not the one that was registered, or lies elsewhere."""
        info, known = self._module_info, self._known_local
        registered = info.module._parameters.get(info.param_name, self.sharded_param)
        self._known_local = local = getattr(registered, "_local_tensor", None)
        return registered is not self.sharded_param or (known is not None and local is not known)

    def to_unsharded(self) -> None:
        super().to_unsharded()
        self._was_trained = self._unsharded_param.requires_grad

    def to_sharded(self) -> None:
        self._carry_requires_grad()
        super().to_sharded()

    def _carry_requires_grad(self) -> None:
        """What was changed on the unsharded parameter counts for the shard."""
        if self.sharded_state == ShardedState.UNSHARDED:
            is_trained = self._unsharded_param.requires_grad
            if is_trained != self._was_trained:
                self.sharded_param.requires_grad_(is_trained)

    def forget_gathered(self) -> None:
        """What was gathered has another dtype than what will be: the next gather makes it anew."""
        self.is_recast = self._is_alias = False
        self.all_gather_outputs = []
        if (unsharded := self.__dict__.pop("_unsharded_param", None)) is not None:
            self._accumulated_grad = unsharded.grad

    def _refuse_sparse_gradient(self) -> None:
        """Called by the core too."""
        _step_messages.refuse_sparse_gradient(self)

    # ---- resharded to a smaller mesh after forward ----

    def check_post_forward(self) -> None:
        """NotImplementedError at set-up for what torch's class finds out in mid-step."""
        has_extension = hasattr(self._sharded_local_tensor, "fsdp_pre_all_gather")
        if self.is_dtensor or has_extension:
            what = "has an all-gather extension" if has_extension else "is a DTensor of its own"
            raise NotImplementedError(
                f"reshard_after_forward is an int, and parameter '{self._param_fqn}' {what}, which"
                " cannot be resharded to a smaller mesh: pass True or False"
            )

    def _init_sharded_post_forward_param_metadata(self, param: Tensor) -> None:
        if self.is_special:  # these are never resharded to another mesh
            return
        super()._init_sharded_post_forward_param_metadata(param)
        dim, mesh_info = self.fsdp_placement.dim, self.post_forward_mesh_info
        if dim > 0 and mesh_info is not self.mesh_info:
            size = list(self._orig_size)
            size[dim] //= mesh_info.shard_mesh_size
            self.sharded_post_forward_size = torch.Size(size)
            self.contiguous_sharded_post_forward_stride = strides_for(size, None)

    @torch.no_grad()
    def to_sharded_post_forward(self) -> None:
        self._carry_requires_grad()
        dim = self.fsdp_placement.dim
        if dim == 0 and self._orig_size[0] % self.mesh_info.shard_mesh_size == 0:
            super().to_sharded_post_forward()
            return
        # torch's class cuts the padded buffer in pieces, which here are not those of the mesh.
        info = self.post_forward_mesh_info
        parts = _fsdp_param._chunk_with_empty(
            self._unsharded_param.detach(), info.shard_mesh_size, dim=dim
        )
        own = parts[info.shard_mesh_rank].clone(memory_format=torch.contiguous_format)
        own = own.view(self.sharded_post_forward_size)  # torch's empty chunks have one dim
        super().to_sharded_post_forward()
        self._sharded_post_forward_param._local_tensor = own
        if dim > 0:
            self._sharded_post_forward_param_data = own

    def to_sharded_post_forward_dtensor(self, tensor: Tensor) -> DTensor:
        shard = super().to_sharded_post_forward_dtensor(tensor)
        if self.fsdp_placement.dim > 0:
            shard._spec = DTensorSpec(
                shard.device_mesh,
                (Replicate(), self.fsdp_placement),
                tensor_meta=shard._spec.tensor_meta,
            )
        return shard

    # ---- what is gathered ----

    @property
    def all_gather_inputs(self) -> list[Tensor]:
        self._update_alias()
        if self._is_alias:
            return self.all_gather_outputs  # torch's group copies it onto itself: nothing
        is_sharded = self.sharded_state == ShardedState.SHARDED
        if not (is_sharded and hasattr(self._sharded_local_tensor, "fsdp_pre_all_gather")):
            self._inputs = [tensor.view(-1) for tensor in super().all_gather_inputs]
            return self._inputs
        inputs, metadata = _all_gather_extension.ask(self)
        self._extensions_data.all_gather_metadata = metadata
        self._extensions_data.all_gather_input_sizes = [tensor.size() for tensor in inputs]
        self._inputs = [tensor.view(-1) for tensor in inputs]
        return self._inputs

    def init_all_gather_outputs(
        self,
        numels: list[int],
        dtypes: list[torch.dtype],
        world_size: int,
        device: torch.device,
        **kwargs: Any,
    ) -> None:
        inputs, self._inputs = self._inputs, []
        is_alone = world_size == 1 and len(inputs) > 1
        if is_alone:  # torch's group copies only the first of an extension's inputs
            numels = [tensor.numel() for tensor in inputs]
            dtypes = [tensor.dtype for tensor in inputs]
        with outside_of_inference():
            super().init_all_gather_outputs(numels, dtypes, world_size, device, **kwargs)
        if not is_alone:
            return
        self.alloc_all_gather_outputs()
        for output, tensor in zip(self.all_gather_outputs[1:], inputs[1:], strict=True):
            with torch.autograd._unsafe_preserve_version_counter(output):
                output.copy_(tensor)

    def init_unsharded_param(self) -> None:
        is_new = not hasattr(self, "_unsharded_param")
        if hasattr(self._sharded_local_tensor, "fsdp_post_all_gather"):
            self._run_extension(is_new)
        else:
            with outside_of_inference():
                super().init_unsharded_param()
        if is_new:
            copy_attributes(self.sharded_param, self._unsharded_param)
            if self._accumulated_grad is not None:
                grad, self._accumulated_grad = self._accumulated_grad, None
                self._unsharded_param.grad = grad.to(_versions.leaf_grad_dtype(self))

    @torch.no_grad()  # what the user's code computes there is no part of the model's graph
    def _run_extension(self, is_new: bool) -> None:
        with contextlib.nullcontext() if is_new else self.explained(), outside_of_inference():
            super().init_unsharded_param()

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """While an extension fills a whole parameter: an error says what may be the matter."""
        try:
            yield
        except RuntimeError as error:
            if self.fsdp_placement != Shard(0):
                raise
            rows = self._orig_size[0]
            padded = self.padded_sharded_param_size[0] * self.mesh_info.shard_mesh_size
            if padded == rows:
                raise
            name = self._param_fqn or self._module_info.param_name
            raise RuntimeError(
                f"{error}\nThis was raised by fsdp_post_all_gather of parameter '{name}', which"
                f" has {rows} rows, as has `out`, while the gathered tensors have {padded}, the"
                " last of them padding: narrow them to the rows of `out`"
            ) from error

    # ---- a rank that holds all of it: the unsharded parameter is the shard's memory ----

    def _can_alias(self) -> bool:
        info, local = self.mesh_info, self._sharded_local_tensor
        return (
            # A shard mesh of one rank keeps torch's rule: what forward writes is dropped.
            not isinstance(info, FSDPMeshInfo)
            and self.param_dtype is None
            and not (self.offload_to_cpu or self.is_special or _env.is_strict())
            and type(local) is Tensor
            and not hasattr(local, "fsdp_pre_all_gather")
            and local.is_contiguous()
            # Torch's group would cut storage of another size.
            and local.untyped_storage().nbytes() == math.prod(self._orig_size) * local.itemsize
        )

    def _update_alias(self) -> None:
        """Before a gather: shows the shard, as it is now, as what was gathered; or no longer."""
        was_alias, self._is_alias = self._is_alias, self._can_alias()
        local = self._sharded_local_tensor
        if self._is_alias:
            outputs = self.all_gather_outputs
            if was_alias and outputs[0].data_ptr() == local.data_ptr():
                return
            # Not a view: writes to the shard are none to what autograd has saved of this one.
            output = torch.empty(0, dtype=local.dtype).set_(
                local.untyped_storage(), 0, (local.numel(),)
            )
        elif was_alias:
            output = torch.empty(local.numel(), dtype=self.param_dtype or local.dtype)
        else:
            return
        self.all_gather_outputs = [output]
        if hasattr(self, "_unsharded_param"):
            shown: Any = self._unsharded_param
            shown = shown._local_tensor if isinstance(shown, DTensor) else shown
            with torch.autograd._unsafe_preserve_version_counter(shown):
                shown.data = output.view(self._orig_size)

    def free_unsharded_param(self) -> None:
        if not self._is_alias:
            super().free_unsharded_param()


@contextlib.contextmanager
def outside_of_inference() -> Iterator[None]:
    """What is made here is trained later, also if the first forward is in inference mode."""
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield

"""What a step warns of and refuses."""

from __future__ import annotations

import warnings
from typing import Any


def warn_of_hidden_output(unit: str, stacklevel: int) -> None:
    warnings.warn(
        f"FSDP unit '{unit}' has no tensor in its output that needs a gradient and that"
        " FSDP can find (it looks into tuples, lists, dicts and dataclasses). If one is hidden"
        " there, return it in one of these; until then the unit keeps its full parameters from"
        " forward to backward",
        stacklevel=stacklevel + 1,
    )


def warn_of_failed_backward(stacklevel: int) -> None:
    warnings.warn(
        "the previous backward ended in an exception: its gradients, and those kept from"
        " earlier backwards without synchronisation, are dropped",
        stacklevel=stacklevel + 1,
    )


def refuse_sparse_gradient(fsdp_param: Any) -> None:
    raise ValueError(
        f"the gradient of parameter '{fsdp_param._param_fqn}' is sparse, which cannot"
        " be reduced: build the module with sparse=False"
    )


def warn_of_double_backward(unit: str) -> None:
    """Called by a backward that itself is differentiated."""
    warnings.warn(
        f"backward with create_graph=True through FSDP unit '{unit}': a second backward through"
        " that graph is not supported. It fails where parameters have been resharded (an error"
        " about setStorage), and elsewhere leaves gradients out. Compute what needs it on modules"
        " without fully_shard",
        stacklevel=2,
    )


def warn_of_view(modules: list[str]) -> None:
    """Called in strict mode where torch's `fully_shard` warns: what it says of itself."""
    warnings.warn(
        f"FSDP2-wrapped module ({', '.join(modules)}) returned a view tensor. Under torch's"
        " fully_shard an in-place operation on it drops the pre-backward hook, and backward then"
        " fails or gives wrong gradients: use out-of-place operations, or clone() the output first",
        stacklevel=2,
    )

"""PyTorch FSDP2 with a C core: ``from fsdp_c import fully_shard``, the rest as before.

Importing the package alone loads nothing, not even torch: ``python -m fsdp_c script.py`` leaves it
to the script when torch is imported.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fsdp_c._api import *  # noqa: F403


def __getattr__(name: str) -> Any:
    if name.startswith("_") and name != "__all__":  # submodules, and what the import system asks
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from fsdp_c import _api

    names = {public: getattr(_api, public) for public in _api.__all__}
    globals().update(names, __all__=_api.__all__)
    if name not in globals():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__getattr__("__all__")})

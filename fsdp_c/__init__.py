"""PyTorch FSDP2 with a C core: ``from fsdp_c import fully_shard``, the rest as before.

Importing the package alone loads nothing, not even torch: ``python -m fsdp_c script.py`` leaves it
to the script when torch is imported.
"""

from typing import TYPE_CHECKING

from fsdp_c._built import __version__ as __version__

if TYPE_CHECKING:  # which would take any name for an attribute if it saw __getattr__
    from fsdp_c._api import *  # noqa: F403
    from fsdp_c._api import __all__ as __all__
else:

    def __getattr__(name):
        if name.startswith("_") and name != "__all__":  # submodules, and what imports ask for
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from fsdp_c import _built

        try:
            from fsdp_c import _native  # noqa: F401 - before what another torch may lack
        except _built.NotBuilt as error:
            raise error.with_traceback(None) from None  # its one line says all
        from fsdp_c._compat import _torch_names

        _torch_names.check()
        from fsdp_c import _api

        names = {public: getattr(_api, public) for public in _api.__all__}
        globals().update(names, __all__=_api.__all__)
        if name not in globals():
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return globals()[name]

    def __dir__():
        return sorted([*__getattr__("__all__"), "__version__"])

"""Runs a script or a module as python does, with fsdp_c's fully_shard in the place of torch's.

Neither torch nor fsdp_c's own parts are loaded before the script asks for them: it may set
environment variables first.
"""

from __future__ import annotations

import importlib.util
import io
import os
import runpy
import sys
import zipfile
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, SourceFileLoader
from types import ModuleType
from typing import Any, NoReturn

from fsdp_c import _delegate, _spawn

USAGE = """usage: python -m fsdp_c SCRIPT [ARG ...]
       python -m fsdp_c -m MODULE [ARG ...]
       torchrun [OPTION ...] -m fsdp_c SCRIPT [ARG ...]
       python -m fsdp_c estimate --help

Runs a script or a module with fsdp_c in the place of torch.distributed.fsdp.fully_shard.
"""
_WATCHED = "torch.distributed.fsdp"


# ---- the replacement, as soon as torch's function exists ----


def watch() -> None:
    """Replaces torch's fully_shard as soon as it is imported."""
    _spawn.carry()
    if _WATCHED in sys.modules:
        _redirect(sys.modules[_WATCHED])
    else:
        sys.meta_path.insert(0, _Finder())


def _redirect(module: Any) -> None:
    _delegate.redirect(module.fully_shard, _first_call)


def _first_call(*args: Any, **options: Any) -> Any:
    # Late: importing it in the middle of torch's own import would be circular.
    from fsdp_c import _install

    _install.install()
    return _install.fully_shard(*args, **options)


class _Finder:
    """Leaves finding to the others and looks at the watched module once it has been loaded."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != _WATCHED:
            return None
        sys.meta_path.remove(self)  # type: ignore[arg-type]
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)  # type: ignore[assignment]
        return spec


class _Loader:
    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        _redirect(module)


# ---- running ----


def main(arguments: Sequence[str]) -> None:
    """`arguments`: what follows `python -m fsdp_c`."""
    if list(arguments) in ([], ["-m"]):
        sys.stderr.write(USAGE)
        sys.exit(2)
    if arguments[0] in ("-h", "--help"):
        sys.stdout.write(USAGE)
        return
    if arguments[0] == "estimate":  # a script of that name: ./estimate
        from fsdp_c._estimate import _command

        _command.main(arguments[1:])
        return
    watch()
    if arguments[0] == "-m":
        name, *rest = arguments[1:]
        sys.argv[:] = ["-m", *rest]
        _run(_fresh_main(), lambda: runpy._run_module_as_main(name))  # type: ignore[attr-defined]
    else:
        sys.argv[:] = arguments
        _run_path(arguments[0])


def _run_path(path: str) -> None:
    is_safe = getattr(sys.flags, "safe_path", False)
    main = _fresh_main()
    if os.path.isdir(path) or zipfile.is_zipfile(path):
        sys.path[0 : 0 if is_safe else 1] = [os.path.abspath(path)]
        _run(main, lambda: runpy._run_module_as_main("__main__", False))  # type: ignore[attr-defined]
        return
    if not is_safe:
        sys.path[0] = os.path.dirname(os.path.realpath(path))
    full = os.path.abspath(path)
    try:
        with io.open_code(full) as file:
            source = file.read()
    except OSError as error:
        why = f"[Errno {error.errno}] {error.strerror}"
        print(f"{sys.executable}: can't open file {full!r}: {why}", file=sys.stderr)
        sys.exit(2)
    vars(main).update(__file__=full, __cached__=None, __loader__=SourceFileLoader("__main__", full))

    def run() -> None:
        exec(compile(source, full, "exec", dont_inherit=True), vars(main))

    _run(main, run)


def _fresh_main() -> ModuleType:
    """The module that the script will be; so pickles and spawned children find what it defines."""
    main = ModuleType("__main__")
    main.__builtins__ = sys.modules["builtins"]  # type: ignore[attr-defined]
    if "__annotations__" in vars(sys.modules["__main__"]):  # python's own main module has it
        main.__annotations__ = {}
    sys.modules["__main__"] = main
    return main


def _run(main: ModuleType, run: Callable[[], Any]) -> None:
    """Errors are shown without the frames of this file; exit codes are python's."""
    try:
        run()
    except SystemExit:
        raise
    except BaseException as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        _end_silently(error)


def _end_silently(error: BaseException) -> NoReturn:
    sys.excepthook = lambda *_: None
    raise error

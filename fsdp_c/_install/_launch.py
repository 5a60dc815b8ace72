"""Runs a script or a module as python does, with fsdp_c's fully_shard in the place of torch's.

Neither torch nor fsdp_c's own parts are loaded before the script asks for them: it may set
environment variables first.
"""

from __future__ import annotations

import functools
import io
import os
import runpy
import sys
import zipfile
from collections.abc import Callable, Sequence
from importlib.machinery import SourceFileLoader
from types import ModuleType
from typing import Any, NoReturn

from fsdp_c import _built
from fsdp_c._compat import _redirection
from fsdp_c._install import _idle, _import_hook, _integrations, _spawn

USAGE = """usage: python -m fsdp_c [--fsdp1] SCRIPT [ARG ...]
       python -m fsdp_c [--fsdp1] -m MODULE [ARG ...]
       torchrun [OPTION ...] -m fsdp_c [--fsdp1] SCRIPT [ARG ...]
       python -m fsdp_c estimate --help
       python -m fsdp_c snapshots --help
       python -m fsdp_c top --help
       python -m fsdp_c trace --help
       python -m fsdp_c --version

Runs a script or a module with fsdp_c in the place of torch.distributed.fsdp.fully_shard.
--fsdp1: and of torch.distributed.fsdp.FullyShardedDataParallel.
"""
_WATCHED = "torch.distributed.fsdp"


# ---- the replacement, as soon as torch's function exists ----


def watch(fsdp1: bool = False) -> None:
    """Replaces torch's fully_shard as soon as it is imported; with `fsdp1` FSDP1's class too."""
    _spawn.carry(fsdp1)
    _integrations.watch(fsdp1)
    _import_hook.when_loaded(_WATCHED, functools.partial(_redirect, fsdp1))


def _redirect(fsdp1: bool, module: Any) -> None:
    # Late: importing it in the middle of torch's own import would be circular.
    def installed() -> Any:
        from fsdp_c._compat import _torch_names

        _torch_names.check()
        from fsdp_c._install import _install

        _install.install(fsdp1=fsdp1)
        return _install

    def first_call(*args: Any, **options: Any) -> Any:
        return installed().fully_shard(*args, **options)

    _redirection.redirect(module.fully_shard, first_call)
    if fsdp1:
        wrapper = module.FullyShardedDataParallel
        _redirection.redirect_class(wrapper, lambda: installed().FullyShardedDataParallel)


# ---- running ----


def main(arguments: Sequence[str]) -> None:
    """`arguments`: what follows `python -m fsdp_c`."""
    has_fsdp1 = list(arguments[:1]) == ["--fsdp1"]
    arguments = arguments[has_fsdp1:]
    if list(arguments) in ([], ["-m"]):
        sys.stderr.write(USAGE)
        sys.exit(2)
    if arguments[0] in ("-h", "--help"):
        sys.stdout.write(USAGE)
        return
    if arguments[0] == "--version":
        print(_built.describe())
        return
    if arguments[0] == "estimate":  # a script of that name: ./estimate
        from fsdp_c._estimate import _command

        _command.main(arguments[1:])
        return
    if arguments[0] == "snapshots":
        from fsdp_c._snapshots import _command as snapshots_command

        snapshots_command.main(arguments[1:])
        return
    if arguments[0] == "top":
        from fsdp_c._window import _top

        _top.main(arguments[1:])
        return
    if arguments[0] == "trace":
        from fsdp_c._window import _trace

        _trace.main(arguments[1:])
        return
    watch(has_fsdp1)
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
    except SystemExit as end:
        if end.code in (None, 0):
            _idle.tell()
        raise
    except BaseException as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        if (outside := sys.modules.get("fsdp_c._fully_shard._errors")) is not None:
            outside.explain(error.with_traceback(trace))
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        _end_silently(error)
    _idle.tell()


def _end_silently(error: BaseException) -> NoReturn:
    sys.excepthook = lambda *_: None
    raise error

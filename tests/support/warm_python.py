"""A Python that has imported torch already, for tests that start scripts as users do.

`executable()` is a program that takes what `python` takes. A process that imported torch once forks
another one for it, which runs the script and ends as Python does; the program passes signals on and
ends in the same way. So a script starts in tens of milliseconds, and so do those that it starts by
`sys.executable`, torchrun's ranks among them. What torch reads as it is imported is that process's:
where a variable of that kind differs, Python is given an option or a file, the program becomes the
real one. A script has another parent than the one that started it.
"""

import atexit
import contextlib
import functools
import importlib.util
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import types
from pathlib import Path

import namespaces
from rank_process import freeze, receive_message

# Read as torch or what it loads is imported, but for some.
READ_AT_IMPORT = ("TORCH", "PYTORCH", "PYTHON", "LD_", "MALLOC_", "GLIBC_", "MKL_", "OPENBLAS_")
MAY_DIFFER = (
    "PYTHONPATH",
    "PYTHON_EXEC",
    "TORCHELASTIC_",
    "TORCHINDUCTOR_CACHE_DIR",
    "TORCH_NCCL_",
    "TORCH_DISABLE_SHARE_RDZV",
)
FORWARDED = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGQUIT")

CLIENT = """#!{python} -IS
import os, pickle, signal, socket, sys

words = sys.argv[1:]
environment = dict(os.environ)
while words[:1] == ["-u"]:
    words.pop(0)


def at_import(variables):
    return {{
        name: value
        for name, value in variables.items()
        if name.startswith({read_at_import}) and not name.startswith({may_differ})
    }}


is_plain = words and (words[0] in ("-c", "-m") or not words[0].startswith("-"))
n_files = len(os.listdir("/proc/self/fd"))  # and one to look with
if not is_plain or n_files > 4 or at_import(environment) != {at_import}:
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])

server = socket.socket(socket.AF_UNIX)
for name in {forwarded}:
    signal.signal(getattr(signal, name), lambda number, _: server.send(bytes([number])))
server.connect({address!r})
data = pickle.dumps((words, os.getcwd(), environment))
socket.send_fds(server, [len(data).to_bytes(4, "little")], [0, 1, 2])
server.sendall(data)
answer = server.recv(16)
status = int(answer) if answer else 70  # the server has gone
if status < 0:
    signal.signal(-status, signal.SIG_DFL) if -status != signal.SIGKILL else None
    os.kill(os.getpid(), -status)
os._exit(status)
"""


@functools.cache
def executable() -> str:
    """Its path; the process behind it ends with this one."""
    folder = tempfile.mkdtemp(prefix="fsdp_c_warm_")
    address, program = os.path.join(folder, "socket"), Path(folder, "python")
    server = subprocess.Popen(
        [sys.executable, __file__, address, str(program), str(os.getpid())],
        env={**without("PYTHONPATH"), "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
    )
    atexit.register(end, server, folder)
    assert server.stdout is not None
    assert server.stdout.readline() == b"ready\n", "no torch in a process of its own"
    text = CLIENT.format(
        python=sys.executable,
        address=address,
        at_import=at_import(os.environ),
        read_at_import=READ_AT_IMPORT,
        may_differ=MAY_DIFFER,
        forwarded=FORWARDED,
    )
    program.write_text(text)
    program.chmod(0o755)
    return str(program)


def end(server: subprocess.Popen, folder: str) -> None:
    server.kill()
    server.wait()
    for path in Path(folder).iterdir():
        path.unlink()
    os.rmdir(folder)


def without(name: str) -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if key != name}


def at_import(variables: "os._Environ[str]") -> dict[str, str]:
    return {
        name: value
        for name, value in variables.items()
        if name.startswith(READ_AT_IMPORT) and not name.startswith(MAY_DIFFER)
    }


# --- the process that has imported torch ----------------------------------------------------------


class Server:
    """Forks a child for each program that connects, and tells it how that one ended."""

    def __init__(self, address: str) -> None:
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(address)
        self.listener.listen(64)
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.listener, selectors.EVENT_READ)
        self.children: dict[socket.socket, tuple[int, int]] = {}  # a process and what tells its end

    def serve(self) -> tuple[list[str], str, dict[str, str]]:
        """Returns in a child: with what that one is to run."""
        while True:
            for key, _ in self.selector.select():
                if key.fileobj is self.listener:
                    request = self.accept()
                    if request is not None:
                        return request
                elif key.fileobj in self.children:
                    self.pass_on(key.fileobj)
                elif key.data in self.children:
                    self.tell(key.data)  # after which that one may still be in this round

    def accept(self) -> tuple[list[str], str, dict[str, str]] | None:
        client, _ = self.listener.accept()
        try:
            request, fds = receive_message(client, 3)
        except (EOFError, OSError):
            client.close()
            return None
        pid = os.fork()
        if pid == 0:
            self.become_child(client, fds)
            return request
        for fd in fds:
            os.close(fd)
        ended = os.pidfd_open(pid)
        self.children[client] = (pid, ended)
        self.selector.register(client, selectors.EVENT_READ)
        self.selector.register(ended, selectors.EVENT_READ, client)
        return None

    def become_child(self, client: socket.socket, fds: list[int]) -> None:
        namespaces.die_with_parent()
        os.setsid()
        for number, fd in enumerate(fds):
            os.dup2(fd, number)
            os.close(fd)
        for _, ended in self.children.values():
            os.close(ended)
        for one in (client, self.listener, *self.children):
            one.close()
        self.selector.close()

    def pass_on(self, client: socket.socket) -> None:
        """Signals; a program that is gone was killed, and takes its child along."""
        with contextlib.suppress(ConnectionError):
            if numbers := client.recv(64):
                for number in numbers:
                    os.kill(self.children[client][0], number)
                return
        os.kill(self.children[client][0], signal.SIGKILL)
        self.selector.unregister(client)

    def tell(self, client: socket.socket) -> None:
        pid, ended = self.children.pop(client)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        self.selector.unregister(ended)
        os.close(ended)
        if client in (key.fileobj for key in self.selector.get_map().values()):
            self.selector.unregister(client)
        with contextlib.suppress(OSError):
            client.send(str(status).encode())
        client.close()


def prepare(program: str, directory: str, environment: dict[str, str]) -> None:
    """What a new Python finds, but for what is imported."""
    import torch

    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environment)
    os.environ["PYTHON_EXEC"] = sys.executable = program  # what torchrun starts
    torch.set_num_threads(int(environment.get("OMP_NUM_THREADS", os.cpu_count() or 1)))
    paths = list(filter(None, environment.get("PYTHONPATH", "").split(os.pathsep)))
    sys.path[:] = [*paths, *(path for path in sys.path[1:] if path not in paths)]
    sys.stdout.reconfigure(line_buffering=os.isatty(1))


def run(words: list[str]) -> None:
    """As `python WORDS`: in a main module of its own."""
    main = types.ModuleType("__main__")
    main.__builtins__ = __builtins__
    sys.modules["__main__"] = main
    kind, *rest = words
    if kind == "-m":
        sys.argv[:] = rest
        sys.path.insert(0, os.getcwd())
        runpy._run_module_as_main(rest[0])
    elif kind == "-c":
        sys.argv[:] = ["-c", *rest[1:]]
        sys.path.insert(0, "")
        exec(compile(rest[0], "<string>", "exec"), main.__dict__)
    else:
        sys.argv[:] = words
        sys.path.insert(0, os.path.dirname(os.path.realpath(kind)))
        main.__file__ = kind
        main.__cached__ = None
        with open(kind, "rb") as file:
            code = compile(file.read(), kind, "exec")
        exec(code, main.__dict__)


def import_what_scripts_do() -> None:
    import torch.distributed.argparse_util
    import torch.distributed.checkpoint.state_dict
    import torch.distributed.fsdp
    import torch.distributed.launcher.api
    import torch.distributed.tensor.parallel

    if importlib.util.find_spec("triton") is None:  # which complains where a process ends
        import torch._dynamo  # noqa: F401


def main() -> None:
    address, program, parent = sys.argv[1:]
    namespaces.die_with_parent()
    if os.getppid() != int(parent):
        return
    import_what_scripts_do()
    freeze()
    server = Server(address)
    os.write(1, b"ready\n")
    words, directory, environment = server.serve()
    prepare(program, directory, environment)
    run(words)


if __name__ == "__main__":
    # Under its own name, so that a script can be the main module.
    import warm_python

    warm_python.main()

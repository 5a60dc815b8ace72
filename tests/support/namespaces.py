"""Hosts on one machine: a fork in network, process, mount and name spaces of its own.

A *network* is such a fork that holds a bridge; *hosts* are forks of it, each with a cable to the
bridge. Nothing has a name outside: the kernel takes spaces, cables and bridge away when the last
process in them is gone, and the processes go with the one that made them, however that ends.
Started as a program it tries all that, and says what this user may not do.
"""

import ctypes
import os
import signal
import socket
import subprocess
import sys

BRIDGE = "bridge"
CARD = "eth0"  # of a host
_HOSTS_MAX = 16
_NEW_MOUNTS, _NEW_NAME, _NEW_IPC = 0x20000, 0x4000000, 0x8000000
_NEW_USER, _NEW_PROCESSES, _NEW_NETWORK = 0x10000000, 0x20000000, 0x40000000
_SPACES = _NEW_MOUNTS | _NEW_NAME | _NEW_IPC | _NEW_PROCESSES | _NEW_NETWORK
_MOUNT_BIND, _MOUNT_RECURSIVE, _MOUNT_PRIVATE = 1 << 12, 1 << 14, 1 << 18
_PR_SET_PDEATHSIG = 1

_libc = ctypes.CDLL(None, use_errno=True)


def address_of(host: int) -> str:
    return f"10.77.0.{host + 1}"


def name_of(host: int) -> str:
    return f"host{host}"


def cable_of(host: int) -> str:
    """A host's end at the bridge."""
    return f"cable{host}"


def ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"ip {' '.join(words)}: {done.stderr.strip()}")


def limit_rate(rate: str) -> None:
    """What this host sends, to `rate` ("1gbit"), until it ends; called on the host."""
    shape = f"tc qdisc replace dev {CARD} root tbf rate {rate} burst 512kb limit 8mb"
    done = subprocess.run(shape.split(), capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"{shape}: {done.stderr.strip()}")


def die_with_parent() -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def fork_network() -> int:
    """A child with a bridge and no host: 0 in it, else its process id."""
    child, go = _fork_apart("network")
    if child:
        go.send(b"g")
        return child
    _mount_names()
    ip("link", "add", BRIDGE, "type", "bridge")
    ip("link", "set", BRIDGE, "up")
    return 0


def fork_host(host: int) -> int:
    """Of a network: a child that is a host: 0 in it, else its process id."""
    child, go = _fork_apart(name_of(host))
    if child:
        cable = cable_of(host)
        ip("link", "add", cable, "type", "veth", "peer", "name", CARD, "netns", str(child))
        ip("link", "set", cable, "master", BRIDGE, "up")
        go.send(b"g")
        return child
    ip("address", "add", f"{address_of(host)}/24", "dev", CARD)
    ip("link", "set", CARD, "up")
    return 0


def _check(result: int, what: str) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")


def _fork_apart(name: str) -> tuple[int, socket.socket]:
    """The first process of new spaces, when the other one has sent something: (0, ...); there:
    the process id of one that is in the same network."""
    ours, theirs = socket.socketpair()
    user, group = os.getuid(), os.getgid()
    child = os.fork()
    if child:
        theirs.close()
        answer = ours.recv(1000)
        if answer != b"ready":
            os.waitpid(child, 0)
            raise OSError(answer.decode() or "no process could be made in spaces of its own")
        return child, ours
    ours.close()
    die_with_parent()
    try:
        _check(_libc.unshare(_SPACES | (_NEW_USER if user else 0)), "unshare")
        if user:
            _become_root(user, group)
        first = os.fork()
    except OSError as error:
        theirs.send(str(error).encode())
        os._exit(1)
    if first:
        theirs.close()
        os.waitpid(first, 0)
        os._exit(0)
    die_with_parent()
    try:
        _mount(name)
        ip("link", "set", "lo", "up")
    except OSError as error:
        theirs.send(str(error).encode())
        os._exit(1)
    theirs.send(b"ready")
    if not theirs.recv(1):
        os._exit(1)
    theirs.close()
    return 0, theirs


def _become_root(user: int, group: int) -> None:
    """In a user space of its own, which only one user of the outer one is in."""
    for file, text in (
        ("setgroups", "deny"),
        ("uid_map", f"0 {user} 1"),
        ("gid_map", f"0 {group} 1"),
    ):
        with open(f"/proc/self/{file}", "w") as out:
            out.write(text)


def _mount(name: str) -> None:
    socket.sethostname(name)
    mount = _libc.mount
    _check(mount(b"none", b"/", None, _MOUNT_PRIVATE | _MOUNT_RECURSIVE, None), "private mounts")
    _check(mount(b"proc", b"/proc", b"proc", 0, None), "mount of /proc")
    _check(mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, None), "mount of /dev/shm")


def _mount_names() -> None:
    """Hosts find each other's names without the outer network, which they cannot ask."""
    names = [f"{address_of(host)} {name_of(host)}" for host in range(_HOSTS_MAX)]
    for file, lines in (("/etc/hosts", ["127.0.0.1 localhost", *names]), ("/etc/resolv.conf", [])):
        source = f"/dev/shm/{os.path.basename(file)}"  # hosts have a /dev/shm of their own
        with open(source, "w") as out:
            out.write("".join(f"{line}\n" for line in lines))
        if os.path.exists(file):
            bound = _libc.mount(source.encode(), file.encode(), None, _MOUNT_BIND, None)
            _check(bound, f"mount of {file}")


def why_not() -> str:
    """Why this user cannot have hosts; empty if it can."""
    done = subprocess.run([sys.executable, __file__], capture_output=True, text=True, timeout=60)
    return done.stdout.strip() if done.returncode == 0 else done.stderr.strip()[-500:]


def _try() -> str:
    try:
        if (network := fork_network()) == 0:
            try:
                if fork_host(0) == 0:
                    os._exit(0)
                os._exit(0)
            except OSError as error:
                print(error, flush=True)
                os._exit(0)
        os.waitpid(network, 0)
    except OSError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    print(_try())

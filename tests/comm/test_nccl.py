"""NCCL from Python: its header, the copy that torch has, groups of ranks over a stand-in."""

import ctypes
import datetime
import importlib.util
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from nccl_stand_in import built, control_of, watched

from fsdp_c._comm import _nccl

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests" / "gpu"))

import gpu_nccl  # noqa: E402
from gpu_rows import Rows, read  # noqa: E402

API = ROOT / "csrc" / "transport" / "nccl_api.h"
CPU = torch.device("cpu")


def installed() -> Path:
    """The folder of the NCCL that pip installed."""
    try:
        spec = importlib.util.find_spec("nvidia.nccl")
    except ModuleNotFoundError:
        spec = None
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("no nvidia-nccl package is installed here: there is no header to compare with")
    return Path(next(iter(spec.submodule_search_locations)))


@pytest.fixture(scope="module")
def stand_in() -> str:
    return built()


# --- declarations ---------------------------------------------------------------------------------


def kind_of(parameter: str) -> str:
    """How a parameter is passed: by what decides between ABIs."""
    words = [word for word in parameter.replace("*", " * ").split() if word != "const"]
    if "*" in words:
        return "pointer"
    kinds = {
        "void": "",
        "int": "int",
        "size_t": "size_t",
        "fc_nccl_id": "id",
        "ncclUniqueId": "id",
        "ncclDataType_t": "int",  # an enum
        "ncclRedOp_t": "int",  # an enum
        "ncclComm_t": "pointer",
        "cudaStream_t": "pointer",
    }
    return kinds[words[0]] if words else ""


def kinds_of(parameters: str) -> list[str]:
    return [kind for kind in map(kind_of, parameters.split(",")) if kind]


def test_functions_have_the_parameters_of_the_header():
    header = (installed() / "include" / "nccl.h").read_text()
    ours = API.read_text().replace("\\\n", "")
    found = re.findall(r'X\(\w+, "(\w+)", \d+,\s*\(([^()]*)\)\)', ours)
    assert len(found) == 13
    for name, parameters in found:
        theirs = re.search(rf"^ncclResult_t +{name}\(([^)]*)\)", header, re.MULTILINE)
        assert theirs is not None, name
        assert kinds_of(parameters) == kinds_of(theirs[1]), name


CHECK = """
#include "nccl.h"
#include "transport/nccl_api.h"
#define SAME(a, b) _Static_assert((long long)(a) == (long long)(b), #a)
#define PLACE(ours, theirs) SAME(offsetof(fc_nccl_config, ours), offsetof(ncclConfig_t, theirs))
PLACE(size, size); PLACE(magic, magic); PLACE(version, version); PLACE(blocking, blocking);
PLACE(cga_cluster_size, cgaClusterSize); PLACE(min_ctas, minCTAs); PLACE(max_ctas, maxCTAs);
PLACE(net_name, netName); PLACE(split_share, splitShare); PLACE(traffic_class, trafficClass);
PLACE(comm_name, commName); PLACE(collnet_enable, collnetEnable); PLACE(cta_policy, CTAPolicy);
PLACE(shrink_share, shrinkShare); PLACE(nvls_ctas, nvlsCTAs);
PLACE(channels_per_net_peer, nChannelsPerNetPeer); PLACE(nvlink_centric_sched, nvlinkCentricSched);
SAME(sizeof(fc_nccl_id), sizeof(ncclUniqueId)); SAME(sizeof(ncclDataType_t), sizeof(int));
SAME(FC_NCCL_SUCCESS, ncclSuccess); SAME(FC_NCCL_REMOTE_ERROR, ncclRemoteError);
SAME(FC_NCCL_IN_PROGRESS, ncclInProgress); SAME(FC_NCCL_INT8, ncclInt8);
SAME(FC_NCCL_UINT8, ncclUint8); SAME(FC_NCCL_INT32, ncclInt32); SAME(FC_NCCL_INT64, ncclInt64);
SAME(FC_NCCL_FLOAT16, ncclFloat16); SAME(FC_NCCL_FLOAT32, ncclFloat32);
SAME(FC_NCCL_FLOAT64, ncclFloat64); SAME(FC_NCCL_BFLOAT16, ncclBfloat16);
SAME(FC_NCCL_SUM, ncclSum); SAME(FC_NCCL_NO_COLOR, NCCL_SPLIT_NOCOLOR);
SAME(FC_NCCL_UNDEFINED, NCCL_CONFIG_UNDEF_INT);
#ifdef NCCL_API_MAGIC /* older headers have no name for it */
SAME(FC_NCCL_MAGIC, NCCL_API_MAGIC);
#endif
"""


def test_layouts_and_constants_are_those_of_the_header(tmp_path: Path):
    """Without CUDA's headers: NCCL's uses their types as handles alone."""
    (tmp_path / "cuda_runtime.h").write_text("typedef struct CUstream_st *cudaStream_t;\n")
    (tmp_path / "cuda_fp16.h").write_text("")
    command = ["gcc", "-std=gnu11", "-fsyntax-only", "-w", f"-I{tmp_path}", "-Icsrc", "-x", "c"]
    command += [f"-I{installed() / 'include'}", "-include", "stddef.h", "-"]
    done = subprocess.run(command, cwd=ROOT, input=CHECK, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# --- libraries ------------------------------------------------------------------------------------


def test_the_installed_copy_is_taken_whole(monkeypatch: pytest.MonkeyPatch):
    """No GPU is needed for that. A torch that is built for CUDA has it loaded."""
    header = (installed() / "include" / "nccl.h").read_text()
    code = re.search(r"#define NCCL_VERSION_CODE (\d+)", header)
    assert code is not None
    monkeypatch.delenv("FSDP_C_NCCL", raising=False)
    monkeypatch.setattr(_nccl, "_library", None)
    places = _nccl.candidates()
    assert places[0] == ("libnccl.so.2", True) and places[-1] == ("libnccl.so.2", False)
    assert str(installed() / "lib" / "libnccl.so.2") in [path for path, _ in places]
    library = _nccl.opened()
    assert library.version == int(code[1])
    assert library.text.startswith("NCCL 2.") and str(installed() / "lib") in library.text
    assert (";" in library.text) == (library.version < 23003)
    assert _nccl.describe() == library.text and _nccl.opened() is library


def test_without_a_library_each_place_is_told(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_nccl, "_library", None)
    monkeypatch.setattr(
        _nccl, "candidates", lambda: [("libnowhere.so", True), ("libm.so.6", False)]
    )
    assert _nccl.describe() == ""
    with pytest.raises(NotImplementedError) as caught:
        _nccl.opened()
    assert "libnowhere.so has not been loaded by this process; libm.so.6" in str(caught.value)


def test_room_for_two_communicators(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    monkeypatch.delenv("NCCL_LAUNCH_ORDER_IMPLICIT", raising=False)
    assert _nccl._needs_one(23007, CPU)
    monkeypatch.setenv("NCCL_LAUNCH_ORDER_IMPLICIT", "1")
    assert not _nccl._needs_one(23007, CPU)
    assert _nccl._needs_one(22505, CPU)
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    assert _nccl._needs_one(23007, CPU)


RANKS_OF_A_GPU = [f"{ranks} on one GPU" for ranks in ("1 rank", "2 ranks", "3 ranks")]


def nccl_rows(tmp_path: Path, device_type: str) -> list[tuple[str, str, str]]:
    gpu_nccl.run(Rows(tmp_path / "rows", "nccl"), device_type)
    return [(row["check"], row["result"], row["note"]) for row in read(tmp_path / "rows")]


def test_gpu_check_says_what_it_leaves_out(tmp_path: Path):
    left_out = [(name, "left out", "there is no GPU") for name in RANKS_OF_A_GPU]
    assert nccl_rows(tmp_path, "cpu") == left_out


def test_gpu_check_requires_several_ranks_over_nccl(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """An NCCL that is too old for them is no reason to leave them out."""
    old = _nccl.Library(None, 22809, "NCCL 2.28.9")
    monkeypatch.setattr(_nccl, "opened", lambda: old)
    monkeypatch.setattr(gpu_nccl.gpu_ranks, "run", lambda *_, **__: None)
    why = "it needs NCCL 2.30.3 (NCCL 2.28.9)"
    assert nccl_rows(tmp_path, "cuda") == [
        (RANKS_OF_A_GPU[0], "passed", ""),
        *((name, "not run", why) for name in RANKS_OF_A_GPU[1:]),
    ]


# --- groups ---------------------------------------------------------------------------------------


def idle_test(path: str):
    is_idle = ctypes.CDLL(path).fc_stand_in_is_idle
    is_idle.restype, is_idle.argtypes = ctypes.c_bool, [ctypes.c_void_p]
    return is_idle


def open_group(path: str, seconds: float = 300, **uses: bool):
    """A group of all ranks over the library, and what waits for a stream's work."""
    os.environ["FSDP_C_NCCL"] = path
    _nccl._library = None
    try:
        timeout = datetime.timedelta(seconds=seconds)
        process_group = dist.new_group(list(range(dist.get_world_size())), timeout=timeout)
        group = _nccl.group_for(process_group, CPU, **uses)
        assert _nccl.group_for(process_group, CPU) is group
    finally:
        del os.environ["FSDP_C_NCCL"]
    is_idle = idle_test(path)
    return group, lambda stream: group.wait(is_ready=lambda: is_idle(stream), what="synchronize")


def check_collectives(rank: int, n_ranks: int, path: str):
    import fsdp_c

    group, wait = open_group(path)
    assert group.text.startswith(f"{n_ranks} ranks over NCCL 2.30.7, a communicator each")
    assert "NCCL 2.30.7" in str(fsdp_c.status())
    whole = torch.zeros(n_ranks, 5)
    whole[rank] = rank + 1
    group.collect(what="all_gather", outputs=[whole], inputs=[], stream=7, unit="layers.0")
    outputs = [torch.zeros(n_ranks, 3), torch.zeros(n_ranks, dtype=torch.int64)]
    inputs = [torch.full((3,), rank + 0.5), torch.tensor([rank])]
    group.collect(what="all_gather_each", outputs=outputs, inputs=inputs, stream=7, unit="layers.1")
    part = torch.zeros(4, dtype=torch.bfloat16)
    summands = torch.arange(4 * n_ranks, dtype=torch.bfloat16)
    group.collect(
        what="reduce_scatter", outputs=[part], inputs=[summands], stream=8, unit="layers.1"
    )
    total = torch.tensor([1.0, rank], dtype=torch.float64)
    group.collect(what="all_reduce", outputs=[total], inputs=[], stream=8, unit="layers.0")
    wait(7)
    wait(8)
    assert torch.equal(whole, torch.arange(1.0, n_ranks + 1)[:, None].expand(n_ranks, 5))
    assert torch.equal(outputs[0], torch.arange(n_ranks)[:, None].expand(n_ranks, 3) + 0.5)
    assert torch.equal(outputs[1], torch.arange(n_ranks))
    assert torch.equal(part, n_ranks * summands[4 * rank : 4 * rank + 4])
    assert total.tolist() == [n_ranks, n_ranks * (n_ranks - 1) / 2]
    with pytest.raises(ValueError, match="needs contiguous tensors"):
        group.collect(what="all_reduce", outputs=[whole.T], inputs=[], stream=7, unit="layers.0")
    with pytest.raises(NotImplementedError, match="does not add up elements of type"):
        group.collect(
            what="all_reduce", outputs=[torch.tensor([True])], inputs=[], stream=7, unit="layers.0"
        )
    group.close()
    with pytest.raises(RuntimeError, match="all-reduce of unit layers.0: NCCL's part of process"):
        group.collect(what="all_reduce", outputs=[total], inputs=[], stream=7, unit="layers.0")


def check_ways(rank: int, n_ranks: int, path: str):
    """What times gathers on GPUs, over the stand-in."""
    control = control_of(path)
    control.ends_work = True  # nothing else waits before a copy-out
    group, wait = open_group(path)
    before = control.n_collectives
    text = gpu_nccl.time_ways(group, rank, n_ranks, 16, CPU, 7, lambda: wait(7), 3)
    assert re.fullmatch(r"staged \d+ us, direct \d+ us", text)
    assert control.n_collectives - before == 3 * (1 + 10)
    control.ends_work = False
    group.close()


def check_communicators(rank: int, n_ranks: int, path: str):
    """Two only where both kinds of collectives are made, and NCCL keeps them in order."""
    for order, uses, n_communicators in (
        ("1", {}, "a communicator each"),
        ("1", {"gathers": False}, "one communicator"),
        ("1", {"reduces": False}, "one communicator"),
        ("0", {}, "one communicator"),
    ):
        os.environ["NCCL_LAUNCH_ORDER_IMPLICIT"] = order
        group, _ = open_group(path, **uses)
        assert n_communicators in group.text, (order, uses, group.text)
        group.close()
    os.environ["NCCL_LAUNCH_ORDER_IMPLICIT"] = "1"


def check_abort(rank: int, n_ranks: int, path: str):
    group, wait = open_group(path)
    buffer = torch.zeros(n_ranks)
    if rank == 1:
        group.abort("the loss is not a number")
    with pytest.raises(RuntimeError, match="the loss is not a number"):
        group.collect(what="all_gather", outputs=[buffer], inputs=[], stream=0, unit="layers.0")
        wait(0)
    with pytest.raises(RuntimeError, match="cannot be used any more"):
        group.close()


def check_others_run(rank: int, n_ranks: int, path: str):
    """While NCCL has no room for a collective, other threads of the interpreter go on."""
    group, wait = open_group(path)
    control = control_of(path)
    buffer = torch.zeros(n_ranks)

    def make_room() -> None:
        while not control.n_blocked:
            time.sleep(0.001)
        control.blocks = False

    for what, tensors in (("all_gather", buffer), ("all_reduce", buffer[:1])):
        control.blocks = True
        other = threading.Thread(target=make_room)
        other.start()
        group.collect(what=what, outputs=[tensors], inputs=[], stream=0, unit="layers.0")
        other.join()
        wait(0)
    group.close()


@contextmanager
def errors_into(path: Path) -> Iterator[None]:
    """What is written to descriptor 2, by whomever."""
    before = os.dup(2)
    with path.open("w") as file:
        os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(before, 2)
        os.close(before)


def check_deadline(rank: int, n_ranks: int, path: str, folder: Path):
    """The others do not come, and this rank waits for the device by itself."""
    control, is_idle = control_of(path), idle_test(path)
    buffer, errors = torch.zeros(n_ranks), folder / str(rank)
    with watched(path):
        group, _ = open_group(path, seconds=1)
    if rank == 0:
        n_aborts = control.n_aborts
        with errors_into(errors):
            group.collect(what="all_gather", outputs=[buffer], inputs=[], stream=0, unit="layers.7")
            while not is_idle(0):
                time.sleep(0.01)
        line = errors.read_text()
        assert line.startswith("[fsdp_c] the device did not do it within 1 s of its call: rank 1")
        assert "rank 1 has called none" in line
        assert "rank 0 was in all-gather of unit layers.7 of process group" in line
        assert line.count("\n") == 1
        while control.n_aborts < n_aborts + 2:
            time.sleep(0.01)
        with pytest.raises(TimeoutError) as caught:
            group.watch()
        assert str(caught.value).strip() == line.removeprefix("[fsdp_c] ").strip()
        with pytest.raises(RuntimeError, match="cannot be used any more: the device did not do"):
            group.collect(what="all_gather", outputs=[buffer], inputs=[], stream=0, unit="layers.8")
    dist.barrier()
    if rank == 1:
        with pytest.raises(TimeoutError, match="rank 0 failed: the device did not do it within"):
            group.watch()
    group.leave(1.0)


def check_choice(rank: int, n_ranks: int, path: str):
    """One rank lacks the library: none uses it."""
    with pytest.raises(NotImplementedError, match="rank 1 cannot use NCCL: NCCL cannot be opened"):
        open_group("/nowhere/libnccl.so.2" if rank == 1 else path)


def check_all(rank: int, n_ranks: int, path: str, folder: Path):
    os.environ["NCCL_LAUNCH_ORDER_IMPLICIT"] = "1"
    for body in (
        check_collectives,
        check_ways,
        check_communicators,
        check_abort,
        check_others_run,
        check_choice,
    ):
        body(rank, n_ranks, path)
    check_deadline(rank, n_ranks, path, folder)
    _nccl._library = None


def test_groups_over_the_store_of_a_process_group(stand_in: str, tmp_path: Path):
    run_ranks(check_all, 2, stand_in, tmp_path)


def die(rank: int, n_ranks: int, path: str):
    group, wait = open_group(path)
    buffer = torch.zeros(n_ranks)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    group.collect(what="all_gather", outputs=[buffer], inputs=[], stream=0, unit="layers.0")
    wait(0)


def test_the_death_of_a_rank_ends_a_wait(stand_in: str):
    survivor, dead = run_ranks(die, 2, stand_in, fresh=True)
    assert dead.exit_code == -signal.SIGKILL
    assert survivor.exc_type == "RuntimeError"
    lost = r"rank 1 \(pid \d+\) was killed, or left by os\._exit; rank 0 was in"
    assert re.search(lost, survivor.error)

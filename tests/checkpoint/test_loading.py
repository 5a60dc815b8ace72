"""Whole checkpoints read into shards, whole parameters one after another, dumps of shards."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import cached_mesh, run_ranks
from models import WIDTH, Net, Tied, data, shard_blocks, tokens
from parity import on_ranks
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils._python_dispatch import TorchDispatchMode

import fsdp_c
from fsdp_c._checkpoint import _safetensors
from fsdp_c._comm import _dtensor_chunks

OFTEN = torch.arange(200, dtype=torch.float32)


class Odd(nn.Module):
    """Other dims, fewer rows than ranks, no dims, buffers, other dtypes."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.net = Net(n_blocks=2)
        self.wide = nn.Parameter(torch.randn(WIDTH, 8))
        self.one = nn.Parameter(torch.randn(1, WIDTH))
        self.zero = nn.Parameter(torch.randn(()))
        self.short = nn.Parameter(torch.randn(5, 3).bfloat16())
        self.register_buffer("count", torch.tensor(seed))
        self.register_buffer("scratch", torch.ones(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.net(x * self.one) * self.zero
        return (x @ self.wide).sum() + self.short.float().sum()


def sharded(seed: int, shape: tuple[int, ...], names: tuple[str, ...] | None = None) -> Odd:
    model = Odd(seed)
    mesh = cached_mesh(shape, names)

    def place(param: nn.Parameter) -> Shard | None:
        return Shard(1) if param.shape == (WIDTH, 8) else None

    for block in model.net.blocks:
        fsdp_c.fully_shard(block, mesh=mesh)
    return fsdp_c.fully_shard(model, mesh=mesh, shard_placement_fn=place)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def assert_same(model: nn.Module, expected: dict[str, Any]) -> None:
    state = model.state_dict()
    assert state.keys() == expected.keys()
    for name, tensor in state.items():
        assert torch.equal(whole(tensor), whole(expected[name])), name


class Recorded(TorchDispatchMode):
    """The bytes that operations inside allocate for results."""

    def __init__(self) -> None:
        super().__init__()
        self.n_bytes = 0
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.names.append(str(func))
        is_new = not func._schema.is_mutable and not func.is_view
        if is_new and isinstance(result, torch.Tensor) and "from_file" not in str(func):
            self.n_bytes += result.numel() * result.itemsize
        return result


def write_safetensors(path: Path, state: dict[str, torch.Tensor], gap: bytes = b"") -> None:
    """As another writer might: with metadata, and an odd number of bytes in front."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    body = gap
    if gap:
        header["gap"] = {"dtype": "U8", "shape": [len(gap)], "data_offsets": [0, len(gap)]}
    names = {dtype: name for name, dtype in _safetensors.DTYPES.items()}
    # The largest elements first, as the format's own library does.
    for name, tensor in sorted(state.items(), key=lambda item: -item[1].itemsize):
        raw = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        header[name] = {
            "dtype": names[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [len(body), len(body) + len(raw)],
        }
        body += raw
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + body)


def write_all(folder: Path) -> dict[str, Any]:
    state = Odd(1).state_dict()
    torch.save(state, folder / "full.pt")
    write_safetensors(folder / "full.safetensors", state)
    split = folder / "split"
    split.mkdir()
    names = sorted(state)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in parts.items():
        write_safetensors(split / file, {name: state[name] for name in part})
    index = {name: file for file, part in parts.items() for name in part}
    (split / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return state


def check_sources(
    rank: int, n_ranks: int, shape: tuple[int, ...], names: tuple[str, ...] | None, sources: list
) -> None:
    expected = Odd(1).state_dict()
    for source in sources or [expected]:
        model = sharded(0, shape, names)
        model(data(rank)).backward()  # the core runs it; the root stays unsharded
        # One rank after the other, alone: there is no collective.
        for turn in range(n_ranks):
            if turn == rank:
                with Recorded() as recorded:
                    keys = fsdp_c.load_full(model, source)
                assert keys == ([], [])
                if isinstance(source, Path) and source.name != "full.pt":
                    assert "aten.copy_.default" in recorded.names
                    assert recorded.n_bytes == 0, recorded.names
            dist.barrier()
        assert_same(model, expected)
        assert torch.allclose(model(data(0)), Odd(1)(data(0)), rtol=1e-5)


def test_sources(tmp_path: Path) -> None:
    write_all(tmp_path)
    files = ["full.pt", "full.safetensors", "split", "split/model.safetensors.index.json"]
    run_ranks(check_sources, 2, (2,), None, [tmp_path / name for name in files])
    run_ranks(check_sources, 2, (2,), None, [])
    run_ranks(check_sources, 4, (2, 2), ("replicate", "shard"), [tmp_path / files[1]])


def test_without_sharding(tmp_path: Path) -> None:
    """A model that is not sharded, in a process without ranks; files of other writers."""
    state = Odd(1).state_dict()
    write_safetensors(tmp_path / "odd.safetensors", state, gap=b"abc")
    model = Odd(0)
    keys = fsdp_c.load_full(model, tmp_path, strict=False)
    assert keys.unexpected_keys == ["gap"] and keys.missing_keys == []
    assert_same(model, state)
    with torch.device("meta"):
        empty = Odd()
    with pytest.raises(RuntimeError, match="meta device.*to_empty"):
        fsdp_c.load_full(empty, state)
    good = (tmp_path / "odd.safetensors").read_bytes()
    for text, content in [
        ("is cut off", good[:-3]),
        ("not a safetensors", good[:5]),
        ("no JSON", (2).to_bytes(8, "little") + b"{["),
        ("unknown dtype", good.replace(b'"BF16"', b'"BF17"')),
        ("not the bytes", good.replace(b"[5, 3]", b"[5, 4]")),
    ]:
        (tmp_path / "bad.safetensors").write_bytes(content)
        with pytest.raises(ValueError, match=text):
            fsdp_c.load_full(model, tmp_path / "bad.safetensors")
    with pytest.raises(ValueError, match="2 checkpoints"):
        fsdp_c.load_full(model, tmp_path)


def test_written_files(tmp_path: Path) -> None:
    tensors = {
        "byte": torch.arange(3, dtype=torch.uint8),
        "double": torch.randn(2, 3, dtype=torch.float64),
        "none": torch.empty(0, 4),
        "strided": torch.randn(4, 3).t(),
        "float8": torch.randn(3).to(torch.float8_e4m3fn),
    }
    _safetensors.write(tmp_path / "t.safetensors", tensors)
    read = _safetensors.read(tmp_path / "t.safetensors")
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert read[name].dtype == tensor.dtype and read[name].shape == tensor.shape
        assert torch.equal(read[name].tensor().float(), tensor.float())
    _safetensors.write(tmp_path / "empty.safetensors", {})
    assert _safetensors.read(tmp_path / "empty.safetensors") == {}


@on_ranks(2)
def test_misfits_are_named(rank: int, n_ranks: int) -> None:
    model = sharded(0, (n_ranks,))
    before = {name: whole(tensor).clone() for name, tensor in model.state_dict().items()}
    good = Odd(1).state_dict()

    def changed(**changes: Any) -> dict[str, Any]:
        state = {**good, **changes}
        return {name: tensor for name, tensor in state.items() if tensor is not None}

    for state, text in [
        (changed(one=None), "missing: one"),
        (changed(more=OFTEN), "unexpected: more"),
        (changed(one=OFTEN), r"'one' has shape \(1, 6\), the source \(200,\)"),
        (changed(one=good["one"].double()), r"'one' is torch.float32, .*cast=True"),
        (changed(one=OFTEN, wide=OFTEN, more=OFTEN), "'wide'.*'one'.*unexpected"),
    ]:
        with pytest.raises(RuntimeError, match=f"on rank {rank}, nothing was written.*{text}"):
            fsdp_c.load_full(model, state)
    with pytest.raises(ValueError, match="'wide' is a DTensor, not a whole"):
        fsdp_c.load_full(model, model.state_dict())
    assert_same(model, before)
    keys = fsdp_c.load_full(
        model, changed(one=good["one"].double(), short=None, more=OFTEN), strict=False, cast=True
    )
    assert keys == (["short"], ["more"])
    assert_same(model, {**good, "short": before["short"]})


@on_ranks(2)
def test_tied_and_wrapped_names(rank: int, n_ranks: int) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    torch.manual_seed(0)
    plain = Tied()
    state = plain.state_dict()
    for dropped in ("head.weight", "embedding.weight"):
        model = Tied()
        model.blocks[0] = checkpoint_wrapper(model.blocks[0])
        shard_blocks(model, fsdp_c, mesh=cached_mesh((n_ranks,)))
        fsdp_c.load_full(model, {name: t for name, t in state.items() if name != dropped})
        assert torch.equal(model(tokens(0)), plain(tokens(0)))
    names = [name for name, _ in fsdp_c.iter_full_params(model)]
    assert sorted(names) == sorted(name for name, _ in plain.named_parameters())


def check_iteration(model: nn.Module, expected: nn.Module, calls: list[int]) -> None:
    params = dict(expected.named_parameters())
    total = sum(p.numel() * p.itemsize for p in params.values())
    for bucket_bytes, at_most in ((1 << 20, 2), (300, total // 150 + 2), (1, len(params))):
        calls.clear()
        seen = {}
        for name, tensor in fsdp_c.iter_full_params(model, bucket_bytes=bucket_bytes):
            assert torch.equal(tensor, params[name]), name
            seen[name] = tensor.data_ptr()
        assert seen.keys() == params.keys()
        assert len(calls) <= at_most
    assert len(set(seen.values())) < len(seen)  # memory is used again
    for name, tensor in fsdp_c.iter_full_params(model, dtype=torch.bfloat16):
        assert torch.equal(tensor, params[name].bfloat16()), name


@on_ranks(2, 4)
def test_iter_full_params(rank: int, n_ranks: int) -> None:
    calls: list[int] = []
    gather = fsdp_c.Communicator.all_gather

    def counted(self: Any, output: Any, input: Any) -> None:
        calls.append(input.numel())
        gather(self, output, input)

    fsdp_c.Communicator.all_gather = counted  # type: ignore[method-assign]
    try:
        check_iteration(sharded(1, (n_ranks,)), Odd(1), calls)
        if n_ranks == 4:
            check_iteration(sharded(1, (2, 2), ("replicate", "shard")), Odd(1), calls)
    finally:
        fsdp_c.Communicator.all_gather = gather  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="bucket_bytes"):
        next(fsdp_c.iter_full_params(nn.Linear(1, 1), bucket_bytes=0))


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    matrices = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim <= 1]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": rest, "lr": 0.02}]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        model(data(0, step)).backward()
        optimizer.step()
        optimizer.zero_grad()


def check_saved(rank: int, n_ranks: int, folder: Path, steps: int) -> None:
    model = sharded(1, (n_ranks,))
    optimizer = torch.optim.AdamW(groups_of(model), lr=0.01, betas=(0.8, 0.9))
    train(model, optimizer, range(steps))
    fsdp_c.save_shards(model, folder, optimizer=optimizer, extra={"step": steps})


def check_resumed(
    rank: int, n_ranks: int, folder: Path, steps: int, shape: tuple[int, ...]
) -> None:
    names = ("replicate", "shard") if len(shape) == 2 else None
    model, reference = sharded(0, shape, names), Odd(1)
    optimizer = torch.optim.AdamW(groups_of(model), lr=1.0)
    expected = torch.optim.AdamW(groups_of(reference), lr=0.01, betas=(0.8, 0.9))
    for turn in range(n_ranks):  # no collective
        if turn == rank:
            keys, extra = fsdp_c.load_shards(model, folder, optimizer=optimizer)
            assert keys == ([], []) and extra == {"step": steps}
        dist.barrier()
    train(reference, expected, range(steps))
    assert optimizer.param_groups[0]["betas"] == (0.8, 0.9)
    for ours, theirs in zip(optimizer.param_groups, expected.param_groups, strict=True):
        assert {k: v for k, v in ours.items() if k != "params"} == {
            k: v for k, v in theirs.items() if k != "params"
        }
    for extra_steps in (range(0), range(steps, steps + 2)):
        train(model, optimizer, extra_steps)
        train(reference, expected, extra_steps)
        for (name, ours), theirs in zip(
            model.named_parameters(), reference.parameters(), strict=True
        ):
            torch.testing.assert_close(whole(ours), theirs.detach(), rtol=2e-2, atol=2e-3)
            for key, value in expected.state[theirs].items():
                mine = optimizer.state[ours][key]
                if isinstance(mine, DTensor):
                    assert mine.placements == ours.placements, name
                torch.testing.assert_close(whole(mine), value, rtol=2e-2, atol=2e-3)


def test_dump_at_other_world_sizes(tmp_path: Path) -> None:
    """Over a dump that is there; read by as many ranks, by fewer, by more, and by HSDP."""
    for steps, n_ranks in ((1, 3), (2, 2)):
        run_ranks(check_saved, n_ranks, tmp_path, steps)
        names = sorted(path.name for path in tmp_path.iterdir())
        assert names == [*(f"dump-{steps}-rank-{r}.safetensors" for r in range(n_ranks))] + [
            "manifest.json"
        ]
        run_ranks(check_resumed, 2, tmp_path, steps, (2,))
    run_ranks(check_resumed, 1, tmp_path, 2, (1,))
    run_ranks(check_resumed, 3, tmp_path, 2, (3,))
    run_ranks(check_resumed, 4, tmp_path, 2, (2, 2))


def check_interrupted(rank: int, n_ranks: int, folder: Path) -> None:
    model = sharded(1, (n_ranks,))
    fsdp_c.save_shards(model, folder, extra=1)
    replace = Path.replace

    def fail(self: Path, target: Path) -> Path:
        raise OSError("power cut")

    Path.replace = fail  # type: ignore[method-assign]
    try:
        if rank == 0:
            with pytest.raises(OSError, match="power cut"):
                fsdp_c.save_shards(model, folder, extra=2)
    finally:
        Path.replace = replace  # type: ignore[method-assign]


def test_dump_is_atomic(tmp_path: Path) -> None:
    """What was there before counts until the new dump is complete."""
    run_ranks(check_interrupted, 1, tmp_path)
    assert len(list(tmp_path.glob("dump-2-*"))) == 1
    model = Odd(0)
    assert fsdp_c.load_shards(model, tmp_path) == (([], []), 1)
    assert_same(model, Odd(1).state_dict())
    (tmp_path / "dump-1-rank-0.safetensors").unlink()
    with pytest.raises(ValueError, match="damaged.*dump-1-rank-0.safetensors is missing"):
        fsdp_c.load_shards(model, tmp_path)
    (tmp_path / "manifest.json").write_text("{")
    with pytest.raises(ValueError, match="damaged"):
        fsdp_c.load_shards(model, tmp_path)
    (tmp_path / "manifest.json").unlink()
    with pytest.raises(ValueError, match="no complete dump"):
        fsdp_c.load_shards(model, tmp_path)


def test_dump_refuses(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="that the model lacks"):
        other = torch.optim.SGD(nn.Linear(3, 3).parameters())
        fsdp_c.save_shards(model, tmp_path, optimizer=other)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.param_groups[0]["lr"] = object()
    with pytest.raises(ValueError, match="option 'lr' of the optimizer is a object"):
        fsdp_c.save_shards(model, tmp_path, optimizer=optimizer)
    wide = nn.Linear(2, 2, dtype=torch.complex128)
    with pytest.raises(ValueError, match="'weight' is torch.complex128, which a safetensors file"):
        fsdp_c.save_shards(wide, tmp_path)
    assert os.listdir(tmp_path) == []
    fsdp_c.save_shards(model, tmp_path)
    optimizer = torch.optim.SGD(model.parameters(), lr=torch.tensor(0.1))
    with pytest.raises(ValueError, match="without an optimizer"):
        fsdp_c.load_shards(model, tmp_path, optimizer=optimizer)
    fsdp_c.save_shards(model, tmp_path, optimizer=optimizer)
    with pytest.raises(ValueError, match="1 of 1 parameters, saved 1 of 2"):
        fsdp_c.load_shards(model, tmp_path, optimizer=torch.optim.SGD([model.weight]))
    again = torch.optim.SGD(model.parameters(), lr=1.0)
    fsdp_c.load_shards(model, tmp_path, optimizer=again)
    assert torch.equal(again.param_groups[0]["lr"], torch.tensor(0.1))


def test_damaged_dump(tmp_path: Path) -> None:
    """A flipped bit in a weight or in the optimizer's state is found before anything is written."""
    model = nn.Linear(2, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    fsdp_c.save_shards(model, tmp_path, optimizer=optimizer)
    fsdp_c.load_shards(model, tmp_path, optimizer=optimizer)
    (path,) = tmp_path.glob("*.safetensors")
    whole = path.read_bytes()
    header = int.from_bytes(whole[:8], "little")
    places = json.loads(whole[8 : 8 + header])
    for name in ("weight", "optimizer/bias/momentum_buffer"):
        damaged = bytearray(whole)
        damaged[8 + header + places[f"{name}#0"]["data_offsets"][0]] ^= 64
        path.write_bytes(damaged)
        with torch.no_grad():
            model.weight.fill_(7)
        momentum = optimizer.state[model.bias]["momentum_buffer"].clone()
        with pytest.raises(ValueError, match=f"{path.name} is damaged.*'{name}#0'"):
            fsdp_c.load_shards(model, tmp_path, optimizer=optimizer)
        assert (model.weight == 7).all()
        assert torch.equal(optimizer.state[model.bias]["momentum_buffer"], momentum)
        fsdp_c.load_shards(model, tmp_path, optimizer=optimizer, verify=False)
        assert not (model.weight == 7).any()


def test_parts_of_each_rank() -> None:
    """As torch cuts: uneven, empty, over two dims of a mesh."""
    for size in range(8):
        for n in (1, 2, 3, 4):
            full = torch.arange(size)
            parts = _dtensor_chunks.boxes((size,), (n,), (Shard(0),))
            chunks = [c.tolist() for c in full.chunk(n)] + [[]] * n
            assert [full[box].tolist() for box in parts] == chunks[:n]
    grid = _dtensor_chunks.boxes((4, 3), (2, 2), (Shard(0), Shard(1)))
    assert [_dtensor_chunks.box_size(box) for box in grid] == [(2, 2), (2, 1), (2, 2), (2, 1)]
    assert len(set(map(str, _dtensor_chunks.boxes((4,), (2, 2), (Replicate(), Shard(0)))))) == 2

"""State dicts of a sharded model: keys, values that alias shards, loading and assigning."""

import copy
import io

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from harness import cached_mesh, implementation, run_ranks
from snapshots import Net, batch, check_gradients, check_trains
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor


def sharded(net: nn.Module | None = None, **kwargs: object) -> nn.Module:
    net = net or Net()
    api, mesh = implementation(), cached_mesh((dist.get_world_size(),))
    api.fully_shard(net.first, mesh=mesh, **kwargs)
    return api.fully_shard(net, mesh=mesh, **kwargs)


def whole(state: dict) -> dict[str, torch.Tensor]:
    return {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in state.items()}


def assert_equal_states(state: dict, expected: dict) -> None:
    state = whole(state)
    assert list(state) == list(expected)
    for name, value in expected.items():
        assert torch.equal(state[name], value), name


def train(net: nn.Module, rank: int, optimizer: torch.optim.Optimizer | None = None) -> None:
    optimizer = optimizer or torch.optim.SGD(net.parameters(), lr=0.1)
    optimizer.zero_grad()
    net(batch(rank)).square().sum().backward()
    optimizer.step()


# --- reading ---


def read(rank: int, n_ranks: int) -> None:
    api = implementation()
    policy = api.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    plain, net = Net(), sharded(mp_policy=policy)
    for _ in range(2):
        state = net.state_dict()
        assert list(state) == list(plain.state_dict())
        for name, param in net.named_parameters():
            value = state[name]
            assert isinstance(value, DTensor) and isinstance(param, DTensor)
            assert not value.requires_grad
            assert value.dtype is torch.float32
            assert value.placements == (Shard(0),) and value.shape == plain.state_dict()[name].shape
            assert value.to_local().data_ptr() == param.to_local().data_ptr()
        assert type(state["offset"]) is torch.Tensor
        kept = net.state_dict(keep_vars=True)
        assert all(kept[name] is param for name, param in net.named_parameters())
        assert set(net.second.state_dict(prefix="x.")) == {"x.weight", "x.bias"}
        assert_equal_states(state, plain.state_dict())
        net(batch(rank).bfloat16())


@pytest.mark.parametrize("n_ranks", [1, 2, 3])
def test_keys_and_values(n_ranks: int) -> None:
    run_ranks(read, n_ranks)


def follow(rank: int, n_ranks: int) -> None:
    net = sharded()
    early = net.state_dict()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    for _ in range(3):
        before = {name: value.clone() for name, value in whole(early).items()}
        train(net, rank, optimizer)
        assert_equal_states(early, whole(net.state_dict()))
        assert not torch.equal(whole(early)["first.weight"], before["first.weight"])


@pytest.mark.parametrize("n_ranks", [1, 2, 3])
def test_values_follow_the_optimizer(n_ranks: int) -> None:
    run_ranks(follow, n_ranks)


def read_in_the_middle(rank: int, n_ranks: int) -> None:
    net, reference = sharded(), Net()
    loss = net(batch(rank)).square().sum()
    # The root stays unsharded after forward.
    assert not any(isinstance(p, DTensor) for p in net.second.parameters())
    state = net.state_dict()
    assert all(isinstance(state[name], DTensor) for name, _ in reference.named_parameters())
    assert_equal_states(state, reference.state_dict())
    loss.backward()
    check_gradients(net, reference, n_ranks)

    net.zero_grad()
    handle = net.unshard(async_op=True)
    assert isinstance(net.state_dict()["second.weight"], DTensor)
    handle.wait()
    assert not isinstance(net.second.weight, DTensor)
    net.reshard()
    check_trains(net, reference)


@pytest.mark.parametrize("n_ranks", [1, 2])
def test_between_forward_and_backward(n_ranks: int) -> None:
    run_ranks(read_in_the_middle, n_ranks)


class SelfReading(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = self.state_dict()
        return super().forward(x)


def read_inside_forward(rank: int, n_ranks: int) -> None:
    net, reference = sharded(SelfReading()), Net()
    net(batch(rank)).square().sum().backward()
    assert all(isinstance(net.seen[name], DTensor) for name, _ in net.named_parameters())
    assert_equal_states(net.seen, reference.state_dict())
    check_gradients(net, reference, n_ranks)


def test_inside_forward() -> None:
    run_ranks(read_inside_forward, 2)


def read_on_one_rank(rank: int, n_ranks: int) -> None:
    net, reference = sharded(), Net()
    with torch.no_grad():
        net(batch(rank))  # leaves the root unsharded
    if rank == 0:
        assert isinstance(net.state_dict()["second.weight"], DTensor)
    for step in range(2):
        net.zero_grad()
        net(batch(rank, step)).square().sum().backward()
        check_gradients(net, reference, n_ranks, step)


def test_on_one_rank_only() -> None:
    run_ranks(read_on_one_rank, 2)


def list_parameters(rank: int, n_ranks: int) -> None:
    net = sharded()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    net(batch(rank)).sum().backward()
    optimizer.step()
    with torch.no_grad():
        net(batch(rank))
    kinds = {name: isinstance(param, DTensor) for name, param in net.named_parameters()}
    assert kinds == {
        "first.weight": True,
        "first.bias": True,
        "second.weight": False,
        "second.bias": False,
    }
    net.reshard()
    assert all(isinstance(param, DTensor) for param in net.parameters())


def test_named_parameters_do_not_reshard() -> None:
    run_ranks(list_parameters, 2)


def wrap(rank: int, n_ranks: int) -> None:
    net, reference = Net(), Net()
    net.first = checkpoint_wrapper(net.first)
    sharded(net)
    assert list(net.state_dict()) == list(reference.state_dict())
    assert "first._checkpoint_wrapped_module.weight" in dict(net.named_parameters())
    net(batch(rank)).square().sum().backward()
    assert_equal_states(net.state_dict(), reference.state_dict())
    net.load_state_dict(net.state_dict())


def test_checkpoint_wrapper_prefix() -> None:
    run_ranks(wrap, 2)


def copy_and_save(rank: int, n_ranks: int) -> None:
    net = sharded()
    train(net, rank)
    state = net.state_dict()
    copied = copy.deepcopy(state)
    for safe in (True, False):
        buffer = io.BytesIO()
        torch.save(state, buffer)
        buffer.seek(0)
        loaded = torch.load(buffer, weights_only=safe)
        assert_equal_states(loaded, whole(copied))
    saved = whole(copied)
    train(net, rank)
    assert_equal_states(copied, saved)
    assert not torch.equal(whole(net.state_dict())["first.weight"], saved["first.weight"])
    net.load_state_dict(loaded)
    assert_equal_states(net.state_dict(), saved)


def test_deepcopy_and_torch_save() -> None:
    run_ranks(copy_and_save, 2)


# --- loading ---


def other_values(
    n_ranks: int, placement: object = None, dtype: torch.dtype = torch.float32
) -> dict:
    """A state dict of a `Net` with other weights, as DTensors."""
    mesh = cached_mesh((n_ranks,))
    net = Net(seed=1).to(dtype)
    params = dict(net.named_parameters())
    return {
        name: distribute_tensor(value, mesh, [placement or Shard(0)])
        if name in params
        else value + 1
        for name, value in net.state_dict().items()
    }


def load(rank: int, n_ranks: int, after_forward: bool) -> None:
    for placement, dtype in (
        (Shard(0), torch.float32),
        (Replicate(), torch.float32),
        (Shard(0), torch.float64),
    ):
        net = sharded()
        if after_forward:
            train(net, rank)
        objects = {name: (p, p.to_local().data_ptr()) for name, p in net.named_parameters()}
        state = other_values(n_ranks, placement, dtype)
        net.load_state_dict(state)
        for name, param in net.named_parameters():
            assert objects[name] == (param, param.to_local().data_ptr())
            assert param.dtype is torch.float32
        reference = Net()
        reference.load_state_dict(whole(state))
        check_trains(net, reference)

    net = sharded()
    if after_forward:
        train(net, rank)
        with torch.no_grad():
            net(batch(rank))  # the root is unsharded when values arrive
    state = other_values(n_ranks)
    second = {
        name.removeprefix("second."): v for name, v in state.items() if name.startswith("second.")
    }
    net.second.load_state_dict(second)
    del state["second.bias"]
    state["unknown"] = torch.ones(1)
    with pytest.raises(RuntimeError, match="(?s)second.bias.*unknown"):
        net.load_state_dict(state)
    result = net.load_state_dict(state, strict=False)
    assert result.missing_keys == ["second.bias"] and result.unexpected_keys == ["unknown"]
    reference = Net()
    reference.load_state_dict(whole(other_values(n_ranks)))
    check_trains(net, reference)


@pytest.mark.parametrize("n_ranks", [1, 2, 3])
@pytest.mark.parametrize("after_forward", [False, True])
def test_load_in_place(after_forward: bool, n_ranks: int) -> None:
    run_ranks(load, n_ranks, after_forward)


def refuse_plain(rank: int, n_ranks: int) -> None:
    net = sharded()
    with pytest.raises(RuntimeError, match="first.weight"):
        net.load_state_dict(Net(seed=1).state_dict())


def test_plain_tensors_are_refused() -> None:
    run_ranks(refuse_plain, 2)


def assign(rank: int, n_ranks: int, after_forward: bool) -> None:
    net = sharded()
    net.first.bias.requires_grad_(False)
    if after_forward:
        train(net, rank)
    old = dict(net.named_parameters())
    state = other_values(n_ranks)
    net.load_state_dict(state, assign=True)
    for name, param in net.named_parameters():
        assert param is not old[name]
        assert param.requires_grad == (name != "first.bias")
    expected = whole(state)
    for unit, name in ((net.first, "first.weight"), (net, "second.weight")):
        unit.unshard()  # shows what was loaded, and leaves it in place
        assert torch.equal(net.get_parameter(name), expected[name])
        unit.reshard()
    assert_equal_states(net.state_dict(), expected)
    net.first.bias.requires_grad_(True)
    reference = Net()
    reference.load_state_dict(whole(state))
    check_trains(net, reference)


@pytest.mark.parametrize("n_ranks", [1, 2, 3])
@pytest.mark.parametrize("after_forward", [False, True])
def test_load_by_assignment(after_forward: bool, n_ranks: int) -> None:
    run_ranks(assign, n_ranks, after_forward)


def assign_and_put_back(rank: int, n_ranks: int) -> None:
    """As an evaluation of averaged weights does: what had been there keeps its values."""
    net = sharded()
    train(net, rank)
    kept, before = net.state_dict(), whole(net.state_dict())
    others = other_values(n_ranks)
    values = whole(others)
    for _ in range(2):
        for state, wanted in ((others, values), (kept, before)):
            net.load_state_dict(state, assign=True)
            with torch.no_grad():
                net(batch(rank))
            assert_equal_states(net.state_dict(), wanted)
            assert_equal_states(kept, before)
            assert_equal_states(others, values)
    reference = Net()
    reference.load_state_dict(before)
    check_trains(net, reference)


@pytest.mark.parametrize("n_ranks", [1, 2])
def test_what_assignment_replaced_is_put_back(n_ranks: int) -> None:
    run_ranks(assign_and_put_back, n_ranks)


def assign_to_meta(rank: int, n_ranks: int, dtype: torch.dtype) -> None:
    with torch.device("meta"):
        net = Net()
    sharded(net)
    state = other_values(n_ranks, dtype=dtype)
    # Key by key, as loaders of large checkpoints do.
    for name, value in state.items():
        net.load_state_dict({name: value}, assign=True, strict=False)
    assert all(param.dtype is dtype and not param.is_meta for param in net.parameters())
    reference = Net().to(dtype)
    reference.load_state_dict(whole(state))
    net(batch(rank).to(dtype)).square().sum().backward()
    for param, expected in zip(net.parameters(), reference.parameters(), strict=True):
        assert torch.equal(param.full_tensor(), expected)
        assert param.grad.dtype is dtype


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_assignment_to_a_meta_model(dtype: torch.dtype) -> None:
    run_ranks(assign_to_meta, 2, dtype)


def write_shards(rank: int, n_ranks: int) -> None:
    net, reference = sharded(), Net()
    check_trains(net, reference)
    with torch.no_grad():
        for param in (*net.parameters(), *reference.parameters()):
            param.mul_(0.5)
        net(batch(rank))  # leaves the root unsharded
        net.reshard()
        for param in (*net.parameters(), *reference.parameters()):
            param.add_(0.25)
    check_trains(net, reference)


def test_writes_to_shards_take_effect() -> None:
    run_ranks(write_shards, 2)


def replace(rank: int, n_ranks: int) -> None:
    net, reference = sharded(), Net()
    net(batch(rank)).sum().backward()
    net.reshard()
    net.zero_grad()
    value = other_values(n_ranks)["first.weight"]
    net.first.weight = nn.Parameter(value)
    try:
        net(batch(rank)).square().sum().backward()
    except (RuntimeError, ValueError) as error:
        assert "first.weight" in str(error)
        return
    with torch.no_grad():
        reference.first.weight.copy_(value.full_tensor())
    check_gradients(net, reference, n_ranks)


def test_replaced_parameter_counts_or_raises() -> None:
    run_ranks(replace, 2)


# --- moving ---


def move(rank: int, n_ranks: int) -> None:
    net, reference = sharded(), Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    params = list(net.parameters())
    for change in (lambda: net.to("cpu"), net.cpu, net.float):
        assert change() is net
        assert [*map(id, net.parameters())] == [*map(id, params)]
        check_trains(net, reference)
    train(net, rank, optimizer)
    half = sharded().half()
    assert all(param.dtype is torch.float16 for param in half.parameters())
    half.unshard()
    assert half.second.weight.dtype is torch.float16
    half.reshard()
    assert_equal_states(half.state_dict(), Net().half().state_dict())
    early = sharded()
    early.unshard()  # the unit stands alone in a domain of its own before the first forward
    early.reshard()
    early.half()
    early.unshard()
    assert early.second.weight.dtype is torch.float16
    early.reshard()


def test_moves_keep_the_parameters() -> None:
    run_ranks(move, 2)

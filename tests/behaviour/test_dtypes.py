"""D: mixed precision, which dtype where, what is cast, and when dtypes are read."""

import collections
import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from models import data
from parity import on_ranks, total
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import fsdp_c
from behaviour.pairs import (
    ROUGH,
    agree,
    backward,
    features,
    gradients,
    linear,
    local,
    raised,
    shards,
)
from behaviour.records import collectives

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
C64 = torch.complex64


class Seen(nn.Module):
    """Passes everything on; notes the dtypes that it was called with."""

    def __init__(self, n: int = 4, bias: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(n, n, bias=bias)
        self.dtypes: list[str] = []
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.fill_(0.5)

    def forward(self, x: Any, *others: Any, **named: Any) -> Any:
        first = x[0] if isinstance(x, list | tuple) else x
        self.dtypes += [
            str(t.dtype) for t in (first, *others, *named.values()) if torch.is_tensor(t)
        ]
        out = self.linear(first.to(self.linear.weight.dtype))
        return (out, *others, named) if others or named else out


def unit(fsdp: Any, build: Any = Seen, **policy: Any) -> Any:
    return fsdp.fully_shard(build(), mp_policy=MixedPrecisionPolicy(**policy))


def params_of(module: nn.Module) -> list[Any]:
    return module._get_fsdp_state()._fsdp_param_group.fsdp_params


@on_ranks(2)
def test_d1_d2_d3_d4_d5_which_dtype_where(rank: int, n_ranks: int) -> None:
    """Of the unsharded parameter, autograd's gradient and the shard's."""

    def see(fsdp: Any) -> Any:
        seen: list[Any] = []
        for original, param, reduce in (
            (F32, None, None),
            (F32, BF16, None),
            (F32, BF16, F32),
            (F32, F32, F32),
            (F32, None, BF16),
            (F32, F64, None),
            (BF16, F32, None),
            (BF16, None, F32),
            (F64, None, F32),
            (F32, BF16, F64),
            (F32, F16, None),
            (F32, F16, F32),
            (F64, None, None),
            (C64, BF16, None),  # never cast
        ):
            model = unit(
                fsdp, lambda o=original: Seen().to(o), param_dtype=param, reduce_dtype=reduce
            )
            model.unshard()
            by_hand = str(model.linear.weight.dtype)
            model.reshard()
            parameters = shards(model)
            inner: list[str] = []
            model.linear.register_forward_hook(
                lambda m, a, out, i=inner: (
                    m.weight.register_hook(lambda g: i.append(str(g.dtype))) and None
                )
            )
            out = model(torch.full((2, 4), rank + 1.0, dtype=original))
            (out.real if out.is_complex() else out).float().sum().backward()
            facts = params_of(model)[0]
            # From 2.15 autograd's gradient is in the dtype of the reduction already.
            inner = [] if features.grad_dtype else inner
            seen.append((by_hand, inner, str(facts.param_dtype), str(facts.orig_dtype)))
            seen.append(gradients(parameters))
        return seen

    seen = agree(see, ROUGH)
    assert seen[2][0] == "torch.bfloat16" and seen[3]["linear.weight"].dtype is F32
    assert seen[12][0] == "torch.float32" and seen[13]["linear.weight"].dtype is BF16
    assert seen[26][0] == "torch.complex64" and seen[27]["linear.weight"].dtype is C64


@on_ranks(1)
def test_d6_policies_are_checked(rank: int, n_ranks: int) -> None:
    """torch notices in the first forward, with other words."""
    for field in ("param_dtype", "reduce_dtype", "output_dtype"):
        for value in ("bfloat16", torch.int32):
            call = lambda f=field, v=value: unit(fsdp_c, **{f: v})  # noqa: E731
            assert raised(call, field, "floating-point") == "ValueError"


@on_ranks(2)
def test_d7_autocast(rank: int, n_ranks: int) -> None:
    def see(fsdp: Any) -> Any:
        model = unit(fsdp)
        parameters = shards(model)
        with torch.autocast("cpu", BF16):
            out = model(torch.full((2, 4), rank + 1.0))
        out.float().sum().backward()
        return str(out.dtype), gradients(parameters)

    assert agree(see)[0] == "torch.bfloat16"


@on_ranks(1)
def test_d8_d9_d13_d14_what_is_cast_before_forward(rank: int, n_ranks: int) -> None:
    @dataclasses.dataclass(frozen=True)
    class Frozen:
        x: Tensor

    class Opaque:
        def __init__(self, x: Tensor) -> None:
            self.x = x

    Pair = collections.namedtuple("Pair", "a b")

    def see(fsdp: Any) -> Any:
        seen: list[Any] = []

        class Inner(nn.Linear):
            def forward(self, x: Tensor, tree: Any) -> Tensor:
                seen.append(str(x.dtype))
                seen.append([str(tree["list"][0].dtype), str(tree["pair"].b[0].dtype)])
                seen.append([str(t.dtype) for t in tree["set"]])
                seen.append([str(tree["frozen"].x.dtype), str(tree["opaque"].x.dtype)])
                seen.append([str(t.dtype) for t in tree["others"]])
                seen.append([tree["same"] is same, tree["pair"].a is same])
                seen.append([type(tree).__name__, type(tree["pair"]).__name__, tree["text"]])
                return super().forward(x.to(self.weight.dtype))

        same = torch.ones(1, dtype=BF16)
        for casts in (True, False):
            model = unit(fsdp, lambda: Inner(4, 4), param_dtype=BF16, cast_forward_inputs=casts)
            small = torch.ones(2)
            kinds = (F64, F16, torch.float8_e4m3fn, torch.int64, torch.bool, torch.complex64)
            model(
                torch.ones(1, 4),
                collections.OrderedDict(
                    list=[small],
                    pair=Pair(same, (small,)),
                    set={small},
                    frozen=Frozen(small),
                    opaque=Opaque(small),
                    others=tuple(small.to(kind) for kind in kinds),
                    same=same,
                    text="kept",
                ),
            )
        plain = unit(fsdp, lambda: nn.Linear(4, 4), param_dtype=BF16, cast_forward_inputs=False)
        seen.append(raised(lambda: plain(torch.ones(1, 4)), "dtype"))
        shell = nn.Sequential(fsdp.fully_shard(nn.Identity(), mp_policy=MixedPrecisionPolicy(BF16)))
        seen.append(str(shell(torch.ones(1)).dtype))  # a unit without parameters casts as well
        return seen

    seen = agree(see)
    bf16, f32 = "torch.bfloat16", "torch.float32"
    assert seen[:4] == [bf16, [bf16, bf16], [bf16], [bf16, f32]] and seen[5] == [True, True]
    assert seen[4] == [bf16] * 3 + ["torch.int64", "torch.bool", "torch.complex64"]
    assert seen[7] == f32 and seen[-2:] == ["RuntimeError", bf16]


class Batch(collections.OrderedDict):
    """A dict with a field beside its items."""

    name = ""


@dataclasses.dataclass
class Counted:
    x: Tensor
    count: int = dataclasses.field(default=0, init=False)


@on_ranks(1)
def test_d10_d11_d12_containers_keep_their_types(rank: int, n_ranks: int) -> None:
    """torch makes plain dicts of some, leaves packed sequences as they are, or fails."""
    seen: list[Any] = []

    class Inner(nn.Linear):
        def forward(self, x: Tensor, *others: Any) -> Any:
            seen.append(others)
            return super().forward(x), *others

    model = unit(fsdp_c, lambda: Inner(4, 4), param_dtype=BF16, output_dtype=F64)
    batch, counted = Batch(x=torch.ones(1)), Counted(torch.ones(1))
    batch.name, counted.count = "batch", 3
    default = collections.defaultdict(list, x=torch.ones(1))
    packed = nn.utils.rnn.pack_sequence([torch.ones(3, 1), torch.ones(2, 1)])
    for _ in range(2):
        out = model(torch.ones(1, 4), batch, default, counted, packed)
        for found, dtype in ((seen[-1], BF16), (out[1:], F64)):
            got_batch, got_default, got_counted, got_packed = found
            assert type(got_batch) is Batch and got_batch.name == "batch"
            assert got_default.default_factory is list
            assert type(got_counted) is Counted and got_counted.count == 3
            assert type(got_packed) is nn.utils.rnn.PackedSequence
            tensors = (got_batch["x"], got_default["x"], got_counted.x, got_packed.data)
            assert {tensor.dtype for tensor in tensors} == {dtype}
        assert batch["x"].dtype is default["x"].dtype is counted.x.dtype is packed.data.dtype is F32


@on_ranks(2)
def test_d15_casts_of_inputs_have_gradients(rank: int, n_ranks: int) -> None:
    def see(fsdp: Any) -> Any:
        model = unit(fsdp, param_dtype=BF16, reduce_dtype=F32)
        parameters = shards(model)
        x = torch.full((2, 4), rank + 1.0).requires_grad_()
        backward(model, x)
        return x.grad, gradients(parameters)

    assert agree(see)[0].dtype is F32


@on_ranks(2)
def test_d16_d17_d18_outputs_and_nested_units(rank: int, n_ranks: int) -> None:
    def see(fsdp: Any) -> Any:
        model = nn.Sequential(Seen(), Seen(), Seen(), nn.LayerNorm(4))
        policies = (
            MixedPrecisionPolicy(param_dtype=BF16, output_dtype=F64),
            MixedPrecisionPolicy(param_dtype=F64),
            MixedPrecisionPolicy(),
            MixedPrecisionPolicy(param_dtype=F64, output_dtype=F32),
        )
        for child, policy in zip(model, policies, strict=True):
            fsdp.fully_shard(child, mp_policy=policy)
        dtypes: list[str] = []
        for child in model:
            child.register_forward_hook(lambda m, a, out: dtypes.append(str(out.dtype)))
        fsdp.fully_shard(model, mp_policy=MixedPrecisionPolicy(F32, output_dtype=BF16))
        parameters = shards(model)
        out = model(torch.full((2, 4), rank + 1.0))
        out.float().sum().backward()
        inputs = [m.dtypes for m in model if isinstance(m, Seen)]

        many = unit(fsdp, param_dtype=BF16, output_dtype=F32)
        opaque = nn.ParameterList()
        result = many(
            torch.ones(1, 4), torch.ones(1, dtype=torch.int64), more=torch.ones(1), o=opaque
        )
        mixed = nn.Sequential(
            fsdp.fully_shard(nn.Linear(4, 4), mp_policy=MixedPrecisionPolicy(BF16)), nn.Linear(4, 4)
        )
        fsdp.fully_shard(mixed, mp_policy=MixedPrecisionPolicy(F16))
        failed = raised(lambda: mixed(torch.ones(1, 4)), "same dtype")
        kinds = [str(t.dtype) for t in (result[0], result[1], result[2]["more"])]
        return inputs, dtypes, out, gradients(parameters), kinds, failed

    inputs, dtypes, *_, kinds, failed = agree(see, ROUGH)
    assert inputs == [["torch.bfloat16"], ["torch.float64"], ["torch.float64"]]
    assert kinds == ["torch.float32", "torch.int64", "torch.float32"] and failed == "RuntimeError"


class Mixed(nn.Module):
    """Frozen parameters of other dtypes beside trainable ones, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((4, 4), 0.5))
        self.table = nn.Parameter(torch.arange(10).view(5, 2), requires_grad=False)
        self.mask = nn.Parameter(torch.tensor([True, False, True]), requires_grad=False)
        self.scale = nn.Parameter(torch.tensor([1.0009765625] * 3, dtype=F64), requires_grad=False)
        self.register_buffer("offset", torch.full((1,), 0.25))
        self.seen: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        names = ("weight", "table", "mask", "scale", "offset")
        self.seen.append([str(getattr(self, name).dtype) for name in names])
        self.seen.append([self.table.clone(), self.mask.clone(), self.scale.clone()])
        return x @ self.weight * self.table.sum() * self.scale[0].to(x.dtype) + self.offset.to(
            x.dtype
        )


@on_ranks(2)
def test_d19_d21_parameters_of_other_dtypes(rank: int, n_ranks: int) -> None:
    def see(fsdp: Any) -> Any:
        seen: list[Any] = []
        for param in (None, BF16):
            model = unit(fsdp, Mixed, param_dtype=param, reduce_dtype=F32)
            parameters = shards(model)
            for step in range(2):
                backward(model, data(rank, step, 2, 4))
            seen += [model.seen, gradients(parameters), model.offset.dtype]
        return seen

    seen = agree(see, ROUGH)
    kinds = ["torch.int64", "torch.bool"]
    assert seen[0][0] == ["torch.float32", *kinds, "torch.float64", "torch.float32"]
    assert seen[3][0] == ["torch.bfloat16", *kinds, "torch.bfloat16", "torch.float32"]
    assert seen[1]["table"] is None and seen[1]["weight"].dtype is F32


@on_ranks(2)
def test_d20_d23_what_travels(rank: int, n_ranks: int) -> None:
    """Differing dtypes are gathered as bytes, in one call; frozen parameters are not reduced."""

    def see(fsdp: Any) -> Any:
        model = unit(fsdp, Mixed, reduce_dtype=F32)
        with collectives(sizes=True) as seen:
            backward(model, data(rank, 0, 2, 4))
        return [(name, str(dtype), size) for name, dtype, size in seen]

    found = agree(see)
    # Rows of each parameter, padded to the ranks: floats, 64-bit integers, booleans, doubles.
    n_bytes = 2 * (2 * 4 * 4 + 3 * 2 * 8 + 2 * 1 + 2 * 8)
    assert found[0] == ("AG", "torch.uint8", n_bytes)
    assert found[-1] == ("RS", "torch.float32", 8)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x))


@on_ranks(2)
def test_d22_buffers_are_not_cast(rank: int, n_ranks: int) -> None:
    def see(fsdp: Any) -> Any:
        low = unit(fsdp, Normed, param_dtype=BF16)
        failed = raised(lambda: low(torch.ones(3, 4)), "BFloat16", "Float")
        torch.manual_seed(3)
        model = unit(fsdp, Normed)
        parameters = shards(model)
        backward(model, data(rank, 0, 3, 4))
        return failed, low.norm.running_mean, model.norm.running_mean, gradients(parameters)

    failed, low, mean, _ = agree(see, ROUGH)
    assert failed == "RuntimeError" and low.dtype is F32 and mean.any()


@on_ranks(2)
def test_d24_d27_when_dtypes_are_read(rank: int, n_ranks: int) -> None:
    """At the first forward, and at every unshard() by hand."""

    def see(fsdp: Any) -> Any:
        model = unit(fsdp, param_dtype=F64)
        model.to(BF16)
        parameters = shards(model)
        backward(model, torch.full((2, 4), rank + 1.0))
        grads = gradients(parameters)
        frozen = unit(fsdp, lambda: Seen().requires_grad_(False), param_dtype=BF16)
        frozen(torch.ones(1, 4))
        frozen.reshard()
        frozen.requires_grad_(True)
        frozen.unshard()
        frozen.reshard()
        parameters = shards(frozen)
        backward(frozen, torch.full((2, 4), rank + 1.0))
        return grads, gradients(parameters)

    grads, later = agree(see, ROUGH)
    assert grads["linear.weight"].dtype is BF16 and later["linear.weight"].dtype is F32


@pytest.mark.parametrize("reduce", [None, F32])
@on_ranks(2)
def test_d25_trained_after_a_frozen_first_forward(
    rank: int, n_ranks: int, reduce: torch.dtype | None
) -> None:
    """torch fails, or reduces in bfloat16 without a word; here dtypes follow requires_grad."""
    for original in (F32, BF16):
        model = unit(
            fsdp_c,
            lambda o=original: Seen(bias=True).to(o).requires_grad_(False),
            param_dtype=BF16,
            reduce_dtype=reduce,
        )
        model(torch.ones(1, 4))
        model.reshard()
        model.requires_grad_(True)
        parameters = shards(model)
        # 1 and 1 + 2**-8 differ in float32 only: their mean tells the dtype of the reduction.
        x = torch.full((1, 4), 1.0 if rank == 0 else 1 + 2**-7)
        model(x).sum().backward()
        mean = 1 + 2**-8 if reduce is F32 and original is F32 else None
        for name, parameter in parameters.items():
            assert parameter.grad.dtype is original, name
        if mean is not None:
            assert (local(parameters["linear.weight"].grad) == mean).all()


@on_ranks(3)
def test_d26_the_dtype_of_the_reduction(rank: int, n_ranks: int) -> None:
    """256 + 1 + 1 is 256 in bfloat16, and 258 in float32."""
    model = unit(fsdp_c, lambda: Seen().to(BF16).requires_grad_(False), reduce_dtype=F32)
    model(torch.ones(1, 4, dtype=BF16))
    model.reshard()
    model.requires_grad_(True)
    parameters = shards(model)
    model(torch.full((1, 4), 1.0 if rank else 256.0, dtype=BF16)).sum().backward()
    assert (local(parameters["linear.weight"].grad) == 86).all()


class Late(nn.Module):
    """A trainable parameter, and a frozen one of another dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.full((4, 4), 0.5))
        self.b = nn.Parameter(torch.full((4, 4), 0.5, dtype=F64), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.a + (x.to(self.b.dtype) @ self.b).to(x.dtype)


@pytest.mark.parametrize("param", [None, BF16])
@on_ranks(2)
def test_d28_another_dtype_is_unfrozen(rank: int, n_ranks: int, param: torch.dtype | None) -> None:
    """torch 2.13 finds gradients of two dtypes, or one that is not the shard's."""
    model = unit(fsdp_c, Late, param_dtype=param)
    backward(model, torch.ones(2, 4))
    model.zero_grad()
    model.reshard()
    model.requires_grad_(True)
    parameters = shards(model)
    model(torch.full((2, 4), rank + 1.0)).sum().backward()
    for name, dtype in (("a", F32), ("b", F64)):
        grad = local(parameters[name].grad)
        assert grad.dtype is dtype and (grad == 3).all(), name


@on_ranks(2)
def test_d29_freezing_later(rank: int, n_ranks: int) -> None:
    def see(fsdp: Any) -> Any:
        model = nn.Sequential(
            *(unit(fsdp, lambda: nn.Linear(4, 4), param_dtype=BF16) for _ in range(2))
        )
        torch.manual_seed(0)
        fsdp.fully_shard(model)
        parameters = shards(model)
        with torch.no_grad():
            for parameter in parameters.values():
                local_part = parameter.to_local()
                local_part.fill_(0.5)
        seen = []
        for frozen in (("0.weight",), ("0.weight", "0.bias"), ()):
            for name, parameter in parameters.items():
                parameter.requires_grad_(name not in frozen)
            backward(model, torch.full((2, 4), rank + 1.0))
            seen.append(gradients(parameters))
            model.zero_grad()
        loss = total(model(torch.full((2, 4), rank + 1.0)))
        parameters["0.bias"].requires_grad_(False)  # the unit is sharded now
        loss.backward()
        return seen, gradients(parameters)

    seen, _ = agree(see, ROUGH)
    assert seen[1]["0.weight"] is None and seen[1]["1.weight"] is not None


@on_ranks(2)
def test_d30_freezing_while_unsharded(rank: int, n_ranks: int) -> None:
    """Lost at the reshard under torch; kept here."""

    def see(fsdp: Any) -> Any:
        model = linear(fsdp, bias=True)
        parameters = shards(model)
        seen = []
        for is_trained in (False, True):
            model.unshard()
            model.bias.requires_grad_(is_trained)
            model.reshard()
            seen.append(model.bias.requires_grad)
            backward(model, torch.ones(2, 4))
            seen.append(parameters["bias"].grad is not None)
            model.zero_grad()
        return seen

    assert see(fsdp_c) == [False, False, True, True]
    assert see(torch_fsdp) == [True] * 4


@on_ranks(2)
def test_d32_accumulated_and_fresh_gradients_of_different_parameters(
    rank: int, n_ranks: int
) -> None:
    """torch 2.13 cannot reduce a float32 sum and a bfloat16 gradient together."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = (nn.Parameter(torch.full((4, 4), 0.5)) for _ in range(2))

        def forward(self, x: Tensor, name: str) -> Tensor:
            return x @ getattr(self, name)

    def see(fsdp: Any) -> Any:
        model = unit(fsdp, Two, param_dtype=BF16, reduce_dtype=F32)
        parameters = shards(model)
        model.set_requires_gradient_sync(False)
        model(torch.full((1, 4), rank + 1.0), "a").sum().backward()
        model.set_requires_gradient_sync(True)
        call = model(torch.full((1, 4), rank + 1.0), "b").sum().backward
        return raised(call), gradients(parameters)

    ours, grads = see(fsdp_c)
    assert ours == "nothing" and all((grad == 1.5).all() for grad in grads.values())
    if not features.grad_dtype:
        assert see(torch_fsdp)[0] == "AssertionError"


@on_ranks(1)
def test_d31_conversion_after_the_first_forward(rank: int, n_ranks: int) -> None:
    model = linear(fsdp_c, mp_policy=MixedPrecisionPolicy(param_dtype=BF16))
    backward(model, torch.ones(1, 4))
    model.zero_grad()
    model.to(F64)
    parameters = shards(model)
    backward(model, torch.ones(1, 4, dtype=F64))
    assert parameters["weight"].grad.dtype is F64

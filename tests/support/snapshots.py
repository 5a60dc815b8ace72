"""A record of a module that a failed call must leave alone, and a check that it still trains."""

import copy

import torch
import torch.distributed as dist
import torch.nn as nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's plain tensor behind a DTensor, or the tensor itself."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


class Net(nn.Module):
    """Two linear layers and a buffer, with sizes that two or three ranks do not divide."""

    def __init__(self, width: int = 5, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(4, width)
        self.second = nn.Linear(width, 3)
        self.register_buffer("offset", torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x))) + self.offset


class TensorRecord:
    """One parameter or buffer: which object it was, where it lay, what it held."""

    def __init__(self, tensor: torch.Tensor) -> None:
        data = local(tensor.detach())
        self.tensor = tensor
        self.has_values = not (data.is_meta or isinstance(data, FakeTensor))
        self.pointer = data.data_ptr() if self.has_values else None
        self.values = data.clone() if self.has_values else None
        self.facts = self.describe()
        self.attributes = dict(getattr(tensor, "__dict__", {}))

    def describe(self) -> tuple:
        t = self.tensor
        return (
            type(t),
            t.dtype,
            t.device,
            t.shape,
            t.stride(),
            t.requires_grad,
            t.is_leaf,
            id(t.grad),
        )

    def check(self, name: str) -> None:
        assert self.describe() == self.facts, name
        assert dict(getattr(self.tensor, "__dict__", {})) == self.attributes, name
        assert not self.tensor._backward_hooks, name
        if self.has_values:
            data = local(self.tensor.detach())
            assert data.data_ptr() == self.pointer, f"{name} was moved"
            torch.testing.assert_close(data, self.values, rtol=0, atol=0, equal_nan=True)


class Snapshot:
    """Everything about a module tree that `fully_shard` could touch."""

    def __init__(self, root: nn.Module) -> None:
        self.root = root
        self.modules = [
            (name, module, type(module), attributes(module))
            for name, module in root.named_modules()
        ]
        tensors = [*root.named_parameters(), *root.named_buffers()]
        self.tensors = [(name, TensorRecord(tensor)) for name, tensor in tensors]

    def check(self) -> None:
        assert [m for _, m in self.root.named_modules()] == [m for _, m, _, _ in self.modules]
        for name, module, cls, before in self.modules:
            assert type(module) is cls, f"class of {name!r}"
            after = attributes(module)
            assert after.keys() == before.keys(), f"attributes of {name!r}"
            for key, value in before.items():
                if isinstance(value, dict):
                    same = [*map(id, value.values())] == [*map(id, after[key].values())]
                    assert value.keys() == after[key].keys() and same, f"{name}.{key}"
                else:
                    assert after[key] is value, f"{name}.{key}"
        for name, record in self.tensors:
            record.check(name)


def attributes(module: nn.Module) -> dict[str, object]:
    """The module's `__dict__`, with parameters, buffers and hooks copied one level deep."""
    return {k: dict(v) if isinstance(v, dict) else v for k, v in module.__dict__.items()}


def batch(rank: int, step: int = 0, features: int = 4) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(2, features, generator=generator)


def check_gradients(
    model: nn.Module, reference: nn.Module, n_ranks: int, step: int = 0, **close: float
) -> None:
    """The gradients of `model` are the mean over the ranks' batches, as `reference` has it."""
    reference = copy.deepcopy(reference)
    reference.zero_grad(set_to_none=True)
    for rank in range(n_ranks):
        (reference(batch(rank, step)).square().sum() / n_ranks).backward()
    expected = dict(reference.named_parameters())
    for name, param in model.named_parameters():
        assert param.grad is not None, f"{name} has no gradient"
        grad = param.grad.full_tensor() if isinstance(param.grad, DTensor) else param.grad
        torch.testing.assert_close(
            grad,
            expected[name].grad,
            **(close or {"rtol": 1e-5, "atol": 1e-6}),
            msg=lambda text, name=name: f"gradient of {name}: {text}",
        )


def check_trains(model: nn.Module, reference: nn.Module, n_steps: int = 2, lr: float = 0.1) -> None:
    """Trains a sharded model and its plain counterpart, comparing gradients before every step."""
    rank, n_ranks = dist.get_rank(), dist.get_world_size()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for step in range(n_steps):
        optimizer.zero_grad()
        model(batch(rank, step)).square().sum().backward()
        check_gradients(model, reference, n_ranks, step)
        optimizer.step()
        reference.zero_grad(set_to_none=True)
        for peer in range(n_ranks):
            (reference(batch(peer, step)).square().sum() / n_ranks).backward()
        with torch.no_grad():
            for param in reference.parameters():
                param -= lr * param.grad

"""Quantized weights as libraries build them: a frozen base in four bits, and products in int8."""

from typing import Any

import torch
from differential.feature_nets import Kept, UnpackedLinear, Wrapped
from torch import Tensor, nn

aten = torch.ops.aten
BLOCK = 4  # columns that share a scale
LEVELS = 7


class FourBit(Tensor):
    """A matrix in integers of four bits with a scale for each block of a row, as NF4Tensor is.

    What fully_shard does to a shard is done to both inner tensors; nothing else is known.
    """

    @staticmethod
    def __new__(cls, codes: Tensor, scales: Tensor, shape: Any, dtype: torch.dtype) -> "FourBit":
        strides = torch.empty(shape, device="meta").stride()
        return Tensor._make_wrapper_subclass(
            cls, shape, strides=strides, dtype=dtype, device=codes.device
        )

    def __init__(self, codes: Tensor, scales: Tensor, shape: Any, dtype: torch.dtype) -> None:
        self.codes = codes  # rows x columns
        self.scales = scales  # rows x blocks

    @classmethod
    def of(cls, weight: Tensor) -> "FourBit":
        blocks = weight.unflatten(1, (-1, BLOCK))
        scales = blocks.abs().amax(2).clamp(min=1e-6) / LEVELS
        codes = (blocks / scales.unsqueeze(2)).round().to(torch.int8).flatten(1)
        return cls(codes, scales, weight.shape, weight.dtype)

    def dequantize(self) -> Tensor:
        blocks = self.codes.unflatten(1, (-1, BLOCK)) * self.scales.unsqueeze(2)
        return blocks.flatten(1).to(self.dtype)

    def __repr__(self) -> str:
        return f"FourBit({tuple(self.shape)})"

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scales"], (self.shape, self.dtype)

    @classmethod
    def __tensor_unflatten__(cls, tensors: dict[str, Tensor], facts: Any, *_: Any) -> "FourBit":
        return cls(tensors["codes"], tensors["scales"], *facts)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self, *rest = args
        kwargs = kwargs or {}
        if func in (aten.detach.default, aten.alias.default):
            return cls(self.codes, self.scales, self.shape, self.dtype)
        if func in (aten.view.default, aten.as_strided.default):  # flat, or the shape it had
            shape = rest[0] if func is aten.as_strided.default else [self.numel()]
            return cls(self.codes, self.scales, shape, self.dtype)
        if func in (aten.clone.default, aten.empty_like.default):
            return cls(self.codes.clone(), self.scales.clone(), self.shape, self.dtype)
        if func is aten._to_copy.default:
            dtype = kwargs.get("dtype") or self.dtype
            return cls(self.codes.clone(), self.scales.clone(), self.shape, dtype)
        if func is aten.split.Tensor:
            parts = zip(self.codes.split(rest[0]), self.scales.split(rest[0]), strict=True)
            return [cls(c, s, c.shape, self.dtype) for c, s in parts]
        if func is aten.new_zeros.default:
            rows, n_blocks = rest[0][0], self.scales.shape[1]
            codes = self.codes.new_zeros(rest[0])
            return cls(codes, self.scales.new_zeros(rows, n_blocks), rest[0], self.dtype)
        if func is aten.slice.Tensor:
            codes = func(self.codes, *rest)
            return cls(codes, func(self.scales, *rest), codes.shape, self.dtype)
        if func is aten.copy_.default:
            self.codes.copy_(rest[0].codes)
            self.scales.copy_(rest[0].scales)
            return self
        if func is aten.equal.default:
            return all(map(torch.equal, (self.codes, self.scales), (rest[0].codes, rest[0].scales)))
        raise NotImplementedError(f"{func} of a FourBit")

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        return (self.scales, self.codes), (self.dtype, mesh.size())

    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, dtype: Any, *, out: Any = None):  # noqa: ANN201
        scales, codes = outputs
        if out is None:
            return FourBit(codes, scales, codes.shape, metadata[0]), outputs
        assert isinstance(out, FourBit) and codes.data_ptr() == out.codes.data_ptr()
        return None


class FourBitProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.weight = weight
        return x @ weight.dequantize().to(x.dtype).t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad @ ctx.weight.dequantize().to(grad.dtype), None


class LoraLinear(nn.Module):
    """A frozen base in four bits and a trained product of two thin matrices."""

    def __init__(self, width: int, out: int, rank: int = 2) -> None:
        super().__init__()
        base = torch.randn(out, width) / width**0.5
        self.weight = nn.Parameter(FourBit.of(base), requires_grad=False)
        self.lora_a = nn.Linear(width, rank, bias=False)
        self.lora_b = nn.Linear(rank, out, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return FourBitProduct.apply(x, self.weight) + self.lora_b(self.lora_a(x))


class LoraBlock(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = LoraLinear(width, hidden), LoraLinear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class LoraNet(nn.Module):
    def __init__(self, width: int = 8, hidden: int = 16, n_blocks: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(LoraBlock(width, hidden) for _ in range(n_blocks))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


# --- products in int8 -----------------------------------------------------------------------------


def int8_rows(tensor: Tensor) -> tuple[Tensor, Tensor]:
    scales = tensor.detach().abs().amax(-1, keepdim=True).clamp(min=1e-6) / 127
    return (tensor / scales).round(), scales


class Int8Product(torch.autograd.Function):
    """Both operands rounded to int8 by row; the gradient as if they were not."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        (x, x_scales), (w, w_scales) = int8_rows(x), int8_rows(weight.inner)
        return (x @ w.t()) * x_scales * w_scales.t()

    backward = UnpackedLinear.backward


class Int8Weight(Kept):
    """Stored and trained in full precision, gathered in the policy's dtype, multiplied in int8."""

    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, dtype: Any, *, out: Any = None):  # noqa: ANN201
        if out is None:
            return Int8Gathered(outputs[0]), outputs
        return super().fsdp_post_all_gather(outputs, metadata, dtype, out=out)


class Int8Gathered(Wrapped):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.linear:
            x, weight, bias = args
            product = Int8Product.apply(x, weight)
            return product if bias is None else product + bias
        return super().__torch_function__(func, types, args, kwargs or {})


def convert_to_int8(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(Int8Weight(module.weight.detach()))

"""T: what else torch 2.15 adds: kept storage, names, policies, layout functions, extensions."""

from typing import Any

import pytest
import torch
from harness import implementation
from models import data
from parity import on_ranks
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate

from behaviour.pairs import (
    CLOSE,
    agree,
    backward,
    chain,
    features,
    gradients,
    raised,
    ranges,
    sharded,
    shards,
)
from behaviour.test_extensions import Extension

pytestmark = pytest.mark.skipif(
    not features.manual_finalization, reason="this version of torch has none of it"
)


@on_ranks(2)
def test_t5_storage_that_is_kept(rank: int, n_ranks: int) -> None:
    def see(fsdp: Any) -> Any:
        model = sharded(fsdp)
        unit = model.blocks[0]
        parameters = shards(model)
        backward(model, data(rank))
        seen = []

        def pointer() -> tuple[Tensor, int]:
            unit.unshard()
            return unit.up.weight, unit.up.weight.data_ptr()

        model.set_keep_unsharded_storage(True)
        weight, before = pointer()
        backward(model, data(rank, 1))
        seen += [weight.untyped_storage().nbytes() > 0, weight.data_ptr() == before]
        with torch.no_grad():
            for parameter in parameters.values():
                parameter.add_(1)
        backward(model, data(rank, 2))
        again, after = pointer()
        seen += [again is weight, after == before, weight.detach().clone()]
        model.set_keep_unsharded_storage(False, recurse=False)
        unit.set_keep_unsharded_storage(False)
        unit.reshard()
        seen.append(weight.untyped_storage().nbytes())
        backward(model, data(rank, 3))
        return seen, gradients(parameters)

    seen, _ = agree(see)
    assert seen[:4] == [True] * 4 and seen[-1] == 0


@on_ranks(2)
def test_t3_t4_t53_names(rank: int, n_ranks: int) -> None:
    """Messages of replicated units, what is still missing, the range of a backward's end."""

    def see(fsdp: Any) -> Any:
        model = chain(fsdp)
        replicated = replicate(nn.Linear(4, 4))
        for each in (model, replicated):
            each(data(rank, 0, 2, 4))
        texts = []
        for each in (model, replicated):
            with pytest.raises(RuntimeError) as caught:
                each.finalize_backward()
            texts.append(str(caught.value).split()[0])
        model.set_manual_backward_finalization(True)
        backward(model, data(rank, 0, 2, 4))
        opened = ranges(model.finalize_backward)
        return texts, [name for name in opened if "rs_wait" not in name]

    texts, opened = agree(see)
    assert texts == ["FSDP", "Replicate"] and "FSDP::finalize_backward" in opened
    for name in ("get_pending_gradients", "synchronize_gradients", "set_all_gather_layout"):
        assert not hasattr(implementation().FSDPModule, name)
    with pytest.raises(TypeError):
        implementation().MixedPrecisionPolicy(grad_dtype=torch.float32)


@on_ranks(2)
def test_t14_whose_policy_it_is(rank: int, n_ranks: int) -> None:
    def see(fsdp: Any) -> Any:
        model = nn.Linear(4, 4)
        policy = fsdp.MixedPrecisionPolicy(
            torch.bfloat16, param_dtype_override_fn=lambda p: p.dtype if p.dim() == 1 else None
        )
        state = fsdp.fully_shard(model, mp_policy=policy)._get_fsdp_state()
        (group,) = state._fsdp_param_groups
        kept = [p.mp_policy.param_dtype for p in group.fsdp_params]
        return kept, state._mp_policy.param_dtype_override_fn, hasattr(group, "mp_policy")

    assert agree(see) == ([torch.bfloat16, torch.float32], None, False)


@on_ranks(2)
def test_t25_t54_functions_that_lay_out_what_travels(rank: int, n_ranks: int) -> None:
    """A unit that has one of its own is torch's, from then on."""

    def see(fsdp: Any) -> Any:
        model = chain(fsdp)
        parameters = shards(model)
        backward(model, data(rank, 0, 2, 4))
        called = []
        (group,) = model[0]._get_fsdp_state()._fsdp_param_groups
        for name in ("_all_gather_output_fn", "_prepare_reduce_scatter_inputs"):
            default = getattr(group, name)

            def spy(*args: Any, name: str = name, default: Any = default) -> Any:
                called.append((name, len(args)))
                return default(*args)

            setattr(group, name, spy)
        backward(model, data(rank, 1, 2, 4))
        return called, gradients(parameters)

    called, _ = agree(see, CLOSE)
    assert {name for name, _ in called} == {
        "_all_gather_output_fn",
        "_prepare_reduce_scatter_inputs",
    }


@on_ranks(2)
def test_t23_outputs_that_go_after_the_second_method(rank: int, n_ranks: int) -> None:
    def see(fsdp: Any) -> Any:
        seen = []
        for answer in (True, 1):
            model = nn.Sequential(nn.Linear(4, 4))
            fsdp.fully_shard(model)
            inner = model[0].weight._local_tensor
            extension = Extension(inner, alias=False).attach()
            inner.fsdp_should_release_all_gather_outputs_after_post_all_gather = lambda a=answer: a
            text = "" if answer is True else "must return a bool"
            seen.append(raised(lambda m=model: m(data(rank, 0, 2, 4)), text))
            seen += [outputs[0].untyped_storage().nbytes() for outputs, *_ in extension.post]
        return seen

    assert agree(see) == ["nothing", 0, "AssertionError"]

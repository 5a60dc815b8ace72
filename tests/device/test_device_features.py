"""Rare features of fully_shard on the schedule of devices: the tests of the host, run there."""

from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import harness
import pytest
from behaviour import test_collectives as collectives
from behaviour import test_extensions as extensions
from behaviour import test_replicate as replicate
from behaviour import test_tensor_parallel as tensor_parallel
from features import test_llama_2d as llama
from fully_shard import test_visible_collectives as visible

from fsdp_c._comm import _device
from fsdp_c._fully_shard._fsdp_state import FSDPState

Body = tuple[Callable[..., None], Sequence[Any]]


def run_all(rank: int, n_ranks: int, bodies: Sequence[Body], by_torch: bool) -> None:
    """None of them may be handed over."""
    reasons = []

    def refuse(self: Any, states: Any, reason: str) -> None:
        reasons.append(reason)
        raise AssertionError(reason)

    for body, args in bodies:
        with mock.patch.object(FSDPState, "_hand_over", refuse), _device.on_cpu(by_torch):
            body(rank, n_ranks, *args)
        assert not reasons, (body.__qualname__, reasons)


def bodies(module: Any, *names: str, args: Sequence[Any] = ()) -> list[Body]:
    return [(getattr(module, name).on_rank, args) for name in names]


ROWS: dict[str, tuple[int, list[Body]]] = {
    "tensor parallel on 2 ranks": (
        2,
        bodies(
            tensor_parallel,
            "test_tp5_partial_gradients_are_summed_over_tp",
            "test_tp6_loss_parallel",
        ),
    ),
    "tensor parallel on 4 ranks": (
        4,
        bodies(
            tensor_parallel,
            "test_tp2_strided_where_both_shard_a_dim",
            "test_tp6_average_over_data_parallel_only",
        )
        + bodies(tensor_parallel, "test_tp3_the_local_part_is_chunked", args=[6])
        + bodies(llama, "test_llama_in_bf16")
        + bodies(llama, "test_llama_on_four_ranks", args=["2 x 2 x 1"]),
    ),
    "replicate": (
        2,
        bodies(
            replicate,
            "test_rp5_replicated_when_idle_plain_while_unsharded",
            "test_rp7_accumulation_without_sync",
            "test_rp9_replicated_only",
        ),
    ),
    "extensions": (
        2,
        bodies(
            extensions,
            "test_ex1_found_on_the_inner_tensor_at_every_gather",
            "test_ex7_padding_is_never_read",
            "test_ex9_post_receives_rank_major_outputs",
            "test_ex10_outputs_and_inner_tensors_are_freed_at_reshard",
            "test_ex10_other_tensors_stay_allocated",
            "test_ex11_later_calls_refill_the_parameter",
            "test_ex13_a_failed_post_is_called_again",
            "test_ex18_offloaded_shards",
            "test_ex19_gradients_are_plain_and_in_the_original_dtype",
            "test_ex19_frozen_parameters_are_gathered",
            "test_ex20_a_unit_that_comes_late_is_asked_anew",
            "test_ex20_one_pair_of_calls_per_gather",
            "test_ex23_beside_plain_parameters",
            "test_ex6_inputs_that_differ_over_ranks",
            "test_ex17_another_dim_needs_inputs_of_the_shards_size",
        ),
    ),
    "collectives in sight": (
        2,
        bodies(
            visible,
            "test_hook_set_and_taken_back_between_steps",
            "test_hook_of_one_rank",
            "test_hook_after_an_early_unshard",
            "test_mode_in_some_steps",
            "test_padding_is_zeros",
        )
        + bodies(
            collectives,
            "test_w4_w6_w7_order_of_collectives",
            "test_w29_w30_w31_w32_memory_and_calls_of_custom_collectives",
            "test_w34_memory_of_the_group_with_a_custom_reduction",
        )
        + bodies(visible, "test_divide_factor_with_a_hook", args=[False, "sharded", None])
        + bodies(visible, "test_divide_factor_with_a_hook", args=[True, "one replica", None])
        + bodies(
            tensor_parallel,
            "test_tp13_no_collective_for_one_shard",
        ),
    ),
    "collectives in sight on 4 ranks": (
        4,
        bodies(visible, "test_hook_between_replicas_with_partial_sums"),
    ),
    "collectives in sight on one rank": (
        1,
        bodies(visible, "test_divide_factor_with_a_hook", args=[False, "replicas of one", None])
        + bodies(visible, "test_hook_set_and_taken_back_between_steps"),
    ),
    "an extension on one rank": (1, bodies(extensions, "test_ex23_beside_plain_parameters")),
}


@pytest.mark.parametrize("by_torch", [False, True], ids=["host", "torch"])
@pytest.mark.parametrize("row", ROWS)
def test_on_the_schedule(row: str, by_torch: bool) -> None:
    n_ranks, found = ROWS[row]
    harness.run_ranks(run_all, n_ranks, found, by_torch)

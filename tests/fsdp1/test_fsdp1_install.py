"""install(fsdp1=True) and `python -m fsdp_c --fsdp1`: FSDP1 scripts that know torch only."""

import warnings
from functools import partial
from typing import Any

import fsdp1_sides as sides
import pytest
import test_install
import torch.distributed.fsdp as torch_fsdp
from parity import on_ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import FSDP as CHECKPOINTS_FSDP
from torch.distributed.fsdp.wrap import enable_wrap, wrap

import fsdp_c

HELD = torch_fsdp.FullyShardedDataParallel
OURS = fsdp_c.FullyShardedDataParallel


class Early(HELD):
    """Made before anything was installed."""


def hold(cls: Any = HELD) -> Any:
    return cls


@on_ranks(2)
def test_install_and_uninstall(rank: int, n_ranks: int) -> None:
    warnings.simplefilter("ignore")
    before = HELD(nn.Linear(3, 2), device_id=sides.CPU)
    for _ in range(2):
        fsdp_c.install()
        assert type(HELD(nn.Linear(3, 2), device_id=sides.CPU)) is HELD
        fsdp_c.install(fsdp1=True)
        fsdp_c.install(fsdp1=True)
        for cls in (HELD, hold(), partial(HELD).func, torch_fsdp.FullyShardedDataParallel):
            model = cls(nn.Linear(3, 2))
            assert type(model) is OURS and isinstance(model, CHECKPOINTS_FSDP)
        assert torch_fsdp.FullyShardedDataParallel is HELD is OURS is not hold()
        assert isinstance(before, HELD)  # torch's are found, too
        with before.no_sync():
            assert not before._sync_gradients
        early = Early(nn.Linear(3, 2))
        assert isinstance(early, Early) and isinstance(early, OURS)
        with enable_wrap(wrapper_cls=HELD):
            assert type(wrap(nn.Linear(3, 2))) is OURS
        with HELD.summon_full_params(before), OURS.summon_full_params(model):
            assert before.weight.shape == model.weight.shape == (2, 3)
        fsdp_c.uninstall()
        assert HELD is torch_fsdp.FullyShardedDataParallel is hold()
        assert not isinstance(before, OURS) and isinstance(model, HELD)
        assert type(HELD(nn.Linear(3, 2), device_id=sides.CPU)) is HELD
        with pytest.raises(RuntimeError, match="accelerator"):
            HELD(nn.Linear(3, 2))


def test_started_with_the_flag() -> None:
    script = test_install.SCRIPTS / "fsdp1.py"
    answers = test_install.facts_of(test_install.start("-m", "fsdp_c", "--fsdp1", script))
    assert answers == [{"homes": ["fsdp_c", "fsdp_c"]}] * 2

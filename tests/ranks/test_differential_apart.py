"""Random programs whose ranks differ: right by the unsharded model, or an error on all ranks."""

import pytest
from differential import apart
from differential.ways import TRANSPORTS


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_right_or_named(transport: str, world: int) -> None:
    seeds = range({2: 6, 3: 3, 4: 2}[world])
    wrong, ends = apart.run(list(seeds), world, transport)
    assert not wrong, "\n\n".join(wrong)
    assert ends["right"] > 0

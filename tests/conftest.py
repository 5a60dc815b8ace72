"""Makes the source tree importable, adds the suite's options and ends the ranks at the end."""

import sys
from pathlib import Path

import harness
import pytest

# Appended: an installed fsdp_c goes before the one in the source tree.
sys.path.append(str(Path(__file__).resolve().parent.parent))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seeds", type=int, default=40, help="how many random models to try")
    parser.addoption(
        "--first-seed", type=int, default=0, help="the first seed of the random models"
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "random_seed" in metafunc.fixturenames:
        first = metafunc.config.getoption("--first-seed")
        seeds = range(first, first + metafunc.config.getoption("--seeds"))
        metafunc.parametrize("random_seed", seeds)


def pytest_sessionfinish() -> None:
    harness.stop()

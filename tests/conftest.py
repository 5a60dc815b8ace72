"""Makes the source tree importable, adds the suite's options and ends the ranks at the end."""

import sys
from pathlib import Path

import harness
import pytest

# Appended: an installed fsdp_c goes before the one in the source tree.
sys.path.append(str(Path(__file__).resolve().parent.parent))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seeds", type=int, help="how many random programs to run")
    parser.addoption("--first-seed", type=int, default=0, help="the seed of the first of them")


def pytest_sessionfinish() -> None:
    harness.stop()

"""Makes the source tree importable, adds the suite's options and ends the ranks at the end."""

import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
# Tests import what they share by its name alone, from whichever folder.
FOLDERS = sorted({str(path.parent) for path in TESTS.glob("*/test_*.py")})
PACKAGES = {str(path.parent) for path in TESTS.glob("*/__init__.py")}
SHARED = [folder for folder in FOLDERS if folder not in PACKAGES]
sys.path[:0] = [str(TESTS / "support"), *SHARED, str(TESTS)]
# Appended: an installed fsdp_c goes before the one in the source tree.
sys.path.append(str(TESTS.parent))

import harness  # noqa: E402


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seeds", type=int, help="how many random programs to run")
    parser.addoption("--first-seed", type=int, default=0, help="the seed of the first of them")


def pytest_sessionfinish() -> None:
    harness.stop()

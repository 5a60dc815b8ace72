"""Makes the source tree importable, adds the suite's options and ends the ranks at the end."""

import sys
from collections import defaultdict
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
import warm_python  # noqa: E402


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seeds", type=int, help="how many random programs to run")
    parser.addoption("--first-seed", type=int, default=0, help="the seed of the first of them")
    parser.addoption("--one-world", action="store_true", help="two ranks where a test has several")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """`--one-world`: of a test's numbers of ranks, two or else the smallest."""
    if not config.getoption("--one-world"):
        return
    worlds: dict[tuple[str, str], list[int]] = defaultdict(list)
    for item in items:
        worlds[rest_of(item)].append(n_ranks_of(item))
    chosen = {rest: 2 if 2 in sizes else min(sizes) for rest, sizes in worlds.items()}
    items[:] = [item for item in items if n_ranks_of(item) == chosen[rest_of(item)]]


def values_of(item: pytest.Item) -> dict[str, object]:
    return dict(item.callspec.params) if hasattr(item, "callspec") else {}


def n_ranks_of(item: pytest.Item) -> int:
    return values_of(item).get("n_ranks", 0)


def rest_of(item: pytest.Item) -> tuple[str, str]:
    """The test and its other parameters."""
    others = {name: value for name, value in values_of(item).items() if name != "n_ranks"}
    return item.nodeid.partition("[")[0], repr(others)


@pytest.fixture
def quick_scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Python that has imported torch already starts scripts, and what they start."""
    monkeypatch.setattr(sys, "executable", warm_python.executable())


def pytest_sessionfinish() -> None:
    harness.stop()

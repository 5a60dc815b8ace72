"""Makes the source tree importable, adds the suite's options and ends the ranks at the end."""

import random
import sys
import zlib
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
    parser.addoption("--all-worlds", action="store_true", help="each case on all numbers of ranks")
    parser.addoption(
        "--part", type=part, default=(1, 1), metavar="K/N", help="each N-th case of each test"
    )


def part(text: str) -> tuple[int, int]:
    place, _, n = text.partition("/")
    return int(place), int(n)


# Of a test's cases, how many run on other numbers of ranks than two: one in so many.
OTHER_WORLDS = 3


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """All cases of a test run on two ranks, or else the smallest number that it has, and some of
    them on each other number: none with `--one-world`, all with `--all-worlds`."""
    if not config.getoption("--all-worlds"):
        keep_some_worlds(config, items)
    keep_part(*config.getoption("--part"), items)


def keep_part(place: int, n: int, items: list[pytest.Item]) -> None:
    """Of a test's cases each n-th, and never none; which ones differs from test to test."""
    cases: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        cases[item.nodeid.partition("[")[0]].append(item)
    kept: set[pytest.Item] = set()
    for test, of in cases.items():
        first = (zlib.crc32(test.encode()) + place) % n
        kept.update(of[first::n] or of[:1])
    items[:] = [item for item in items if item in kept]


def keep_some_worlds(config: pytest.Config, items: list[pytest.Item]) -> None:
    worlds: dict[str, dict[int, list[pytest.Item]]] = defaultdict(lambda: defaultdict(list))
    for item in items:
        worlds[item.nodeid.partition("[")[0]][n_ranks_of(item)].append(item)
    unwanted: set[pytest.Item] = set()
    for test, of in worlds.items():
        cases = {rest_of(item) for item in of[2 if 2 in of else min(of)]}
        for n_ranks, mine in of.items():
            others = [item for item in mine if rest_of(item) in cases]
            if n_ranks == (2 if 2 in of else min(of)):
                continue
            n = 0 if config.getoption("--one-world") else -(-len(others) // OTHER_WORLDS)
            kept = random.Random(f"{test} {n_ranks}").sample(others, n)
            unwanted.update(set(others) - set(kept))
    items[:] = [item for item in items if item not in unwanted]


def values_of(item: pytest.Item) -> dict[str, object]:
    return dict(item.callspec.params) if hasattr(item, "callspec") else {}


def n_ranks_of(item: pytest.Item) -> int:
    return values_of(item).get("n_ranks", 0)


def rest_of(item: pytest.Item) -> str:
    """The other parameters of the test."""
    return repr({name: value for name, value in values_of(item).items() if name != "n_ranks"})


@pytest.fixture
def quick_scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Python that has imported torch already starts scripts, and what they start."""
    monkeypatch.setattr(sys, "executable", warm_python.executable())


def pytest_sessionfinish() -> None:
    harness.stop()

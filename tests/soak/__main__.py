"""The command line: `python -m tests.soak --only kills --minutes 10`."""

import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent
ROOT = TESTS.parent
# Tests import what they share by its name alone.
FOLDERS = ("support", "checkpoint")
sys.path[:0] = [*(str(TESTS / name) for name in FOLDERS), str(TESTS), str(ROOT / "benchmarks")]

if __name__ == "__main__":
    from soak.cli import main

    sys.exit(main())

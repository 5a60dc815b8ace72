"""The command line: `python -m tests.mutate csrc/engine/apart.c --sample 20`."""

import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(TESTS / "support"), str(TESTS)]

if __name__ == "__main__":
    from mutate.cli import main

    sys.exit(main())

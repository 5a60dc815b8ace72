"""The command line: `python -m tests.differential --seeds 0:500 --ranks 2`."""

import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(TESTS / "support"), str(TESTS), str(TESTS.parent)]

if __name__ == "__main__":
    from differential.cli import main

    sys.exit(main())

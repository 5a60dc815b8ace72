"""The text to train on: the source of Python's standard library, which every machine has."""

import hashlib
import os
import sysconfig
from pathlib import Path

import numpy as np
import torch

# Folders that are not the library's own code, or are tables rather than code.
SKIPPED = {
    "dist-packages",
    "encodings",
    "idle_test",
    "pydoc_data",
    "site-packages",
    "test",
    "tests",
}
VALIDATION_SHARE = 10  # one file in so many is kept for validation


def stdlib_files(root: Path) -> list[Path]:
    """Every source file of the library below `root`, sorted by name."""
    found = []
    for folder, inner, names in os.walk(root):
        inner[:] = set(inner) - SKIPPED  # never entered: site-packages may hold much more
        found += [Path(folder, name) for name in names if name.endswith(".py")]
    return sorted(found, key=lambda p: p.relative_to(root).as_posix())


def is_validation(content: bytes) -> bool:
    """Which side a file is on. It hangs on the content, so that a copy cannot be on both sides."""
    return hashlib.sha256(content).digest()[0] % VALIDATION_SHARE == 0


class Corpus:
    """Training and validation bytes, and batches that depend on nothing but their arguments."""

    def __init__(self, root: Path | None = None):
        root = root or Path(sysconfig.get_path("stdlib"))
        sides: dict[bool, list[bytes]] = {False: [], True: []}
        for path in stdlib_files(root):
            content = path.read_bytes()
            sides[is_validation(content)].append(content)
        if not sides[False] or not sides[True]:
            raise FileNotFoundError(f"no Python source to train on below {root}")
        self.train, self.validation = (
            np.frombuffer(b"\n".join(sides[side]), dtype=np.uint8) for side in (False, True)
        )

    def batch(
        self, key: tuple[int, ...], n_rows: int, seq: int, validation: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets, each (n_rows, seq); `key` is for example (seed, step, rank)."""
        data = self.validation if validation else self.train
        starts = np.random.default_rng(key).integers(0, len(data) - seq, size=n_rows)
        rows = torch.from_numpy(np.stack([data[s : s + seq + 1] for s in starts]).astype(np.int64))
        return rows[:, :-1], rows[:, 1:]

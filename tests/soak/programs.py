"""Random programs under torch's fully_shard and ours: the command line of tests.differential."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from soak.case import Family, Verdict, failed

ROOT = Path(__file__).resolve().parents[2]
BATCH = 200  # of one start of the ranks, which costs as much as 20 programs
SECONDS_EACH = 6
SHOWN = 2500  # characters of the first failure
SEEDS_APART = 10_000_000  # between two seeds of the campaign

# Options and variables of each way, and the numbers of ranks.
WAYS: dict[str, tuple[list[str], dict[str, str], list[int]]] = {
    "shared memory": ([], {}, [2, 1, 3, 4]),
    "messages": ([], {"FSDP_C_TRANSPORT": "callback"}, [2, 3, 4]),
    "device": (["--device"], {}, [2, 1, 3, 4]),
    "rails 1,1": (["--hosts", "1,1"], {}, [2]),
    "rails 2,2": (["--hosts", "2,2"], {}, [4]),
    "features": (["--features"], {}, [2, 4]),
    "features on the device": (["--features", "--device"], {}, [2]),
    "features over messages": (["--features"], {"FSDP_C_TRANSPORT": "callback"}, [2, 4]),
    "features over rails 1,1": (["--features", "--hosts", "1,1"], {}, [2]),
    "features over rails 2,2": (["--features", "--hosts", "2,2"], {}, [4]),
}
FAILURE = re.compile(r"^seed (\d+) on \d+ ranks .*$", re.MULTILINE)
SUMMARY = re.compile(r"^(\d+) seeds, (\d+) lines, (\d+) failures", re.MULTILINE)


def cases(seed: int) -> Iterator[str]:
    first, turn = seed * SEEDS_APART, 0
    while True:
        for way, (_, _, worlds) in WAYS.items():
            yield f"{way}/{worlds[turn % len(worlds)]}/{first}:{first + BATCH}"
            first += BATCH
        turn += 1


def run(key: str, fault: str = "") -> Verdict:
    way, world, seeds = key.split("/")
    options, variables, _ = WAYS[way]
    arguments = [*options, *([] if "--hosts" in options else ["--ranks", world])]
    arguments += ["--fault", fault] if fault else []
    command = [sys.executable, "-m", "tests.differential", "--seeds", seeds, *arguments]
    n = len(range(*map(int, seeds.split(":"))))
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env={**os.environ, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=120 + SECONDS_EACH * n,
        )
    except subprocess.TimeoutExpired as late:
        return failed(f"did not end: {(late.stdout or b'')[-3000:]!r}", n=n)
    summary = SUMMARY.search(done.stdout)
    found = list(dict.fromkeys(FAILURE.findall(done.stdout)))
    if done.returncode == 0 and summary and int(summary[3]) == 0:
        return Verdict(n=n, facts={"lines": int(summary[2])})
    if "cannot have hosts" in done.stdout:
        return Verdict("left out", "no hosts here: the kernel lets this user make no spaces")
    again = " ".join([*(f"{k}={v}" for k, v in variables.items()), "python -m tests.differential"])
    seed = found[0] if found else seeds
    first = FAILURE.search(done.stdout)
    text = done.stdout[first.start() :][:SHOWN] if first else done.stdout
    text += f"\nseeds that failed: {', '.join(found)}" if len(found) > 1 else ""
    return failed(text, n=n, command=f"{again} --seeds {seed} {' '.join(arguments)}".rstrip())


FAMILY = Family(
    "programs",
    "random programs give the bits of torch's fully_shard",
    cases,
    run,
    unit="programs",
)

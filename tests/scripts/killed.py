"""For torchrun --max-restarts: each of its lives but the last is killed, at another moment.

  killed.py FOLDER RANK:MOMENT:STEP ...

Rank 0 to n write into FOLDER which steps they made, and what is left at the end.
"""

import json
import os
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS.parent), str(TESTS / "support"), str(TESTS / "checkpoint")]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from test_snapshots import Life, run  # noqa: E402


def main() -> None:
    folder, deaths = Path(sys.argv[1]), [text.split(":") for text in sys.argv[2:]]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, n_ranks = dist.get_rank(), dist.get_world_size()
    number = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    life = Life("sharded")
    if number < len(deaths):
        victim, moment, step = deaths[number]
        life = Life("sharded", moment=moment, at_step=int(step), victim=int(victim))
    with (folder / f"{rank}.jsonl").open("a", buffering=1) as log:

        def report(step: int, loss: float) -> None:
            log.write(json.dumps([number, step, loss]) + "\n")

        _, _, found = run(rank, n_ranks, life, report)
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

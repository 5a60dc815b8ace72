"""A process that watches another's proportional set size: `python pss_sampler.py PID INTERVAL_S`.

It answers each line on its standard input by one JSON line, {"peak": KiB, "samples": n}, about the
time since the line before. PSS counts a page shared by n processes as 1/n in each, so that it adds
up over ranks; the kernel keeps no peak of it, hence the sampling. Imports stay few: it runs beside
each rank.
"""

import json
import os
import select
import sys
import time


def main() -> None:
    pid, interval_s = sys.argv[1], float(sys.argv[2])
    descriptor = os.open(f"/proc/{pid}/smaps_rollup", os.O_RDONLY)
    peak = samples = 0
    while True:
        started = time.perf_counter()
        # Sampled before the question is looked for, so that every answer holds a fresh sample.
        try:
            text = os.pread(descriptor, 4096, 0)
        except OSError:  # the watched process has ended
            return
        found = text.find(b"\nPss:")
        if found >= 0:
            peak = max(peak, int(text[found + 5 :].split(None, 1)[0]))
            samples += 1
        # The kernel walks every page for a sample: at most a quarter of the time goes there.
        pause_s = max(interval_s, 3 * (time.perf_counter() - started))
        if select.select([0], [], [], pause_s)[0]:
            if not os.read(0, 1):
                return
            print(json.dumps({"peak": peak, "samples": samples}), flush=True)
            peak = samples = 0


if __name__ == "__main__":
    main()

"""How the time of a step on a CPU is spent: ms a step, then torch's operators by their own time.

    OMP_NUM_THREADS=2 python bench/profile_cpu.py [--batch 8] [--lines 20]     # scratch/tokens by bench/token_ids.py

all-MiniLM-L6-v2, MRPC's token ids, dropout on, the engine as `tunesmith train` sets it up.
"""

from __future__ import annotations

import argparse
import statistics

from torch.profiler import ProfilerActivity, profile

from step_turns import WARM_UP, our_turns
from token_files import engine_rows

STEPS = 20


def main() -> None:
    """Prints the median step and a table of operators."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--lines", type=int, default=20)
    args = parser.parse_args()
    take = our_turns(engine_rows("mrpc", "train"), args.batch)
    print(f"{1e3 * statistics.median(take(2 * STEPS)):.0f} ms a step")
    with profile(activities=[ProfilerActivity.CPU]) as found:
        take(STEPS)
    operators = sorted(found.key_averages(), key=lambda one: -one.self_cpu_time_total)
    total = sum(one.self_cpu_time_total for one in operators)
    for one in operators[: args.lines]:
        print(
            f"{100 * one.self_cpu_time_total / total:5.1f}% {one.count / (STEPS + WARM_UP['cpu']):7.1f}x a step  {one.key}"
        )


if __name__ == "__main__":
    main()

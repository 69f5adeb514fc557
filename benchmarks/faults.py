"""Trainings whose disk fails: each call that reaches it, once, while saving and while resuming.

    python -m benchmarks.faults [--most N] [--programs plain,best] [--kinds EIO,ENOSPC] [--together]

Runs the programs of tests/fault_programs.py. For each kind of fault, N calls of each program, spread
evenly over its run, fail one at a time (all without `--most`); then the program is started again
without a fault. Its end must be that of an undisturbed run, bit for bit; no step below the newest
checkpoint is trained again; and no checkpoint is set aside or gone. `--together`: in two processes.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIMIT_S = 24 * 3600.0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--most", type=int)
    parser.add_argument("--programs", default="")
    parser.add_argument("--kinds", default="")
    parser.add_argument("--together", action="store_true")
    given = parser.parse_args()
    sys.path.insert(0, str(ROOT / "tests"))
    import faults

    began, arguments, processes = time.monotonic(), ["--kinds", given.kinds], 1
    arguments += [] if given.most is None else ["--most", str(given.most)]
    with tempfile.TemporaryDirectory() as folder:
        if given.together:
            processes = 2
            arguments += ["--programs", "together", "--together", "0", "--root", folder]
        else:
            arguments += ["--programs", given.programs]
        said = faults.run(folder, *arguments, processes=processes, timeout=LIMIT_S)
    if said is None:
        print("The calls that fail are written in C, and there is no compiler (gcc).")
        return 2
    wrong = [one for one in said if one.get("wrong")]
    for one in wrong:
        print(one)
    counts = [one for one in said if "faults" in one]
    print("| program | faults | ended with a sentence |\n|---|---:|---:|")
    for one in counts:
        print(f"| {one['program']} | {one['faults']} | {one['raised']} |")
    total = sum(one["faults"] for one in counts)
    print(f"{total} faults, {len(wrong)} wrong, {time.monotonic() - began:.0f} s")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

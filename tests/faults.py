"""Faults of the disk, one at a time: what a script does, and what the next start makes of it.

    python faults.py [--programs plain,best] [--kinds EIO,short] [--most N] [--verbose]

For processes with `faulty_calls.c` preloaded: see `run`. Every program of `fault_programs` is run once
undisturbed, and its calls below its folder are counted; then for each of them (or `--most` of each
kind, spread evenly) it is run with that call failing, and started again without a fault. Prints a line
of JSON for each fault whose outcome is wrong, and the counts of each program.
"""

import argparse
import collections
import contextlib
import ctypes
import errno
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
OPEN, READ, WRITE, SYNC, NAME, LOOK = 1, 2, 4, 8, 16, 32
EVERY_CALL = OPEN | READ | WRITE | SYNC | NAME | LOOK

# What fails, with which error, how (0: an error, 1: a part is read or written, 2: a file that ends
# early), and whether all calls after it fail too.
KINDS = {
    "EIO": (EVERY_CALL, errno.EIO, 0, False),
    "ESTALE": (OPEN | READ | LOOK | SYNC, errno.ESTALE, 0, False),
    "EMFILE": (OPEN, errno.EMFILE, 0, False),
    "EACCES": (OPEN | LOOK, errno.EACCES, 0, False),
    "ENOSPC": (WRITE | SYNC | NAME, errno.ENOSPC, 0, False),
    "short": (READ | WRITE, 0, 1, False),
    "ended": (READ, 0, 2, False),
    "EIO for good": (OPEN | READ | LOOK | WRITE | SYNC | NAME, errno.EIO, 0, True),
    "ENOSPC for good": (WRITE | SYNC | NAME, errno.ENOSPC, 0, True),
    "EMFILE for good": (OPEN, errno.EMFILE, 0, True),
}
MEMORY = "MemoryError"
"""Raised by functions in Python: see `Memory`."""


def build(folder):
    """The shim; None without a compiler."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        return None
    library = Path(folder) / "faulty_calls.so"
    source = str(HERE / "faulty_calls.c")
    flags = ("-shared", "-fPIC", "-O1", "-o", str(library), source, "-ldl")
    subprocess.run([compiler, *flags], check=True, capture_output=True, text=True)
    return library


def environment(library):
    """For a process whose calls can fail."""
    path = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "LD_PRELOAD": str(library), "PYTHONPATH": path, "JAX_PLATFORMS": "cpu"}


def run(folder, *arguments, timeout=600):
    """Faults in a process of its own: what it printed, as JSON; None without a compiler."""
    library = build(folder)
    if library is None:
        return None
    command = [sys.executable, str(HERE / "faults.py"), *arguments]
    options = {"capture_output": True, "text": True, "timeout": timeout}
    done = subprocess.run(command, env=environment(library), check=False, **options)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


# -- in that process ----------------------------------------------------------------------------------


class Calls:
    """The shim: calls of C below a folder."""

    def __init__(self):
        self.library = ctypes.CDLL(None)
        self.library.faults_hit.restype = ctypes.c_char_p
        self.library.faults_stop.restype = ctypes.c_long
        text, long, number = ctypes.c_char_p, ctypes.c_long, ctypes.c_int
        self.library.faults_watch.argtypes = [text, long, number, number, number, number]

    @contextlib.contextmanager
    def failing(self, kind, folder, target):
        """While the call of this number fails; 0 for none. Yields what happened."""
        calls, error, how, lasting = KINDS[kind]
        happened = {}
        self.library.faults_watch(str(folder).encode(), target, calls, error, how, lasting)
        try:
            yield happened
        finally:
            happened["count"] = self.library.faults_stop()
            happened["hit"] = self.library.faults_hit().decode().replace(str(folder), "")


class Memory:
    """Functions that take memory, in Python: the n-th call of any of them has none."""

    @contextlib.contextmanager
    def failing(self, _, folder, target):
        from tailrace.trainer.checkpoints import device_copies, file_list, long_arrays, orbax_files

        orbax, happened = orbax_files.import_orbax(), {"count": 0, "hit": ""}
        places = [(orbax, name) for name in ("load", "save", "metadata")]
        places += [(file_list, name) for name in ("read_whole", "_checksum", "_below")]
        places += [(orbax_files, name) for name in ("read_whole", "checksum", "write_list")]
        places += [(orbax_files, name) for name in ("damage_in", "read_long", "write_long")]
        places += [(device_copies.DeviceCopy, "on_host"), (long_arrays.np, "fromfile")]
        with contextlib.ExitStack() as stack:
            for owner, name in places:
                own = getattr(owner, name)

                def short(*args, own=own, name=name, **options):
                    happened["count"] += 1
                    if happened["count"] == target:
                        happened["hit"] = name
                        raise MemoryError(f"Unable to allocate 30 GiB ({name})")
                    return own(*args, **options)

                setattr(owner, name, short)
                stack.callback(setattr, owner, name, own)
            yield happened


def attempt(program, folder, kill=None):
    """What a start of a program returned or raised, and the steps that it trained."""
    import fault_programs
    from killed_fits import Killed

    fault_programs.TRAINED.clear()
    found, error = None, None
    try:
        found = program(folder, kill)
    except Killed as killed:
        error = killed
    except Exception as raised:
        error = raised
    return found, error, list(fault_programs.TRAINED)


def names_in(folder):
    return {path.relative_to(folder).as_posix() for path in folder.glob("kept/**/*")}


def checkpoints_in(folder):
    found = {path.relative_to(folder).as_posix() for path in folder.glob("kept/fit-*/step-*")}
    return {name for name in found if ".unfinished" not in name}


def wrong_with(faulted, again, expected, before, after, kind, newest):
    """What is wrong with the outcome of a fault; empty if nothing is."""
    import tailrace as tr
    from fault_programs import EVERY

    (found, error, trained), (end, failure, retrained) = faulted, again
    if error is not None and not isinstance(error, tr.TailraceError):
        return f"raised {type(error).__name__}: {error}"
    if failure is not None:
        return f"the next start raised {type(failure).__name__}: {failure}"
    for one in (found, end):
        if one is not None and any(
            expected[name].tobytes() != np.asarray(one[name]).tobytes() for name in expected
        ):
            return "ended with other bits"
    if lost := sorted(before - after):
        return f"{lost} are gone"
    if aside := [name for name in after if ".damaged" in name]:
        return f"{aside} were set aside"
    # Steps below the newest checkpoint of before are never trained again.
    if any(step < newest for step in (*trained, *retrained)):
        return f"trained {trained}, then {retrained}, and {newest} were on disk"
    twice = set(trained) & set(retrained)
    if len(twice) > EVERY and "good" not in kind:
        return f"lost {sorted(twice)}"
    return ""


def chosen(count, most):
    """The numbers of the calls that fail: all, or `most`, evenly spread."""
    if most is None or count <= most:
        return range(1, count + 1)
    return sorted({1 + round(n * (count - 1) / max(1, most - 1)) for n in range(most)})


def faults_of(name, most, kinds, root):
    """All faults of a program, at its first start and at a later one; yields an outcome for each."""
    from fault_programs import EVERY, KILLED_AT, PROGRAMS

    program, calls, memory = PROGRAMS[name], Calls(), Memory()
    numbers = iter(range(1_000_000))

    def fresh(like=None):
        folder = root / f"{name}-{next(numbers)}"
        shutil.copytree(like, folder) if like else folder.mkdir()
        return folder

    expected = attempt(program, fresh())
    assert expected[1] is None, expected[1]
    killed = fresh()
    attempt(program, killed, KILLED_AT)
    for phase, like, newest in (("start", None, 0), ("resume", killed, EVERY)):
        for kind in kinds:
            how = memory if kind == MEMORY else calls
            counted = fresh(like)
            with how.failing(kind, counted, 0) as happened:
                attempt(program, counted)
            for number in chosen(happened["count"], most):
                folder = fresh(like)
                before = checkpoints_in(folder)
                with how.failing(kind, folder, number) as happened:
                    faulted = attempt(program, folder)
                again = attempt(program, folder)
                after = checkpoints_in(folder)
                wrong = wrong_with(faulted, again, expected[0], before, after, kind, newest)
                error = "" if faulted[1] is None else f"{type(faulted[1]).__name__}: {faulted[1]}"
                yield {
                    **{"program": name, "phase": phase, "kind": kind, "number": number},
                    **{"hit": happened["hit"], "error": error, "wrong": wrong},
                }
                shutil.rmtree(folder)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--programs", default="")
    parser.add_argument("--kinds", default="")
    parser.add_argument("--most", type=int, default=None, help="faults of a kind; all without it")
    parser.add_argument("--verbose", action="store_true")
    given = parser.parse_args()
    logging.disable(logging.CRITICAL)
    import tailrace.keras  # noqa: F401  (first: it chooses Keras' backend)
    from fault_programs import PROGRAMS

    names = given.programs.split(",") if given.programs else [*PROGRAMS]
    kinds = given.kinds.split(",") if given.kinds else [*KINDS, MEMORY]
    for name in names:
        counts = collections.Counter()
        with tempfile.TemporaryDirectory() as root:
            for outcome in faults_of(name, given.most, kinds, Path(root).resolve()):
                reached = bool(outcome["hit"])
                counts["faults"] += reached
                counts["raised"] += reached and bool(outcome["error"])
                if outcome["wrong"] or given.verbose:
                    print(json.dumps(outcome), flush=True)
        print(json.dumps({"program": name, **counts}), flush=True)


if __name__ == "__main__":
    main()

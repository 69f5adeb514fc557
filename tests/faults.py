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
import itertools
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
LIMIT_S = 1200
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


def run(folder, *arguments, processes=1, timeout=LIMIT_S):
    """Faults in a process of its own, or in several: what was printed; None without a compiler."""
    library = build(folder)
    if library is None:
        return None
    command = [sys.executable, str(HERE / "faults.py"), *arguments]
    if processes > 1:
        launch = ("-m", "tailrace", "launch", "-n", str(processes), "--devices", "1")
        command[1:1] = launch
    options = {"capture_output": True, "text": True, "timeout": timeout}
    done = subprocess.run(command, env=environment(library), check=False, **options)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return [json.loads(text) for text in re.findall(r"FAULT (\{.*\})", done.stdout)]


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
        # With a slash: what a script does with its folder itself is not ours.
        self.library.faults_watch(f"{folder}/".encode(), target, calls, error, how, lasting)
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
        places += [(file_list, name) for name in ("read_whole", "file_checksum", "foreign_files")]
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


def checkpoints_in(folder):
    patterns = ("kept/fit-*/step-*", "kept/_CHECKPOINT_METADATA", "call*.npz")
    found = {path.relative_to(folder).as_posix() for one in patterns for path in folder.glob(one)}
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
    # A run directory that cannot be written ends the fit, which it learns of at the next checkpoint.
    most = 2 * EVERY if isinstance(error, tr.errors.RunError) else EVERY
    twice = set(trained) & set(retrained)
    if len(twice) > most and "good" not in kind:
        return f"lost {sorted(twice)}"
    return ""


def chosen(count, most):
    """The numbers of the calls that fail: all, or `most`, evenly spread; the first are early ones."""
    if most is None or count <= most:
        return range(1, count + 1)
    return [1 + int((n + 0.15) * count / most) for n in range(most)]


class Alone:
    """One process, which has the faults."""

    first = faulty = True

    def same(self, value):
        """The value of the process with the faults, in all, once all have come here."""
        return value


class Several(Alone):
    """One of several processes, of which one has the faults; they go through them together."""

    def __init__(self, which):
        import tailrace as tr
        from tailrace.devices.processes import distributed

        tr.distributed.initialize(timeout_s=300)
        self.meet, self.which = distributed.meet, which
        here = tr.distributed.process_index()
        self.first, self.faulty = here == 0, here == which

    def same(self, value):
        return self.meet({"value": value})[self.which]["value"]


def faults_of(name, most, kinds, root, processes):
    """All faults of a program, at its first start and at a later one; yields an outcome for each."""
    from fault_programs import EVERY, KILLED_AT, PROGRAMS, TOGETHER

    program, calls, memory = {**PROGRAMS, **TOGETHER}[name], Calls(), Memory()
    numbers = itertools.count()

    def fresh(like=None):
        folder = root / f"{name}-{next(numbers)}"
        if processes.first:
            shutil.copytree(like, folder) if like else folder.mkdir()
        processes.same(None)
        return folder

    def failing(kind, folder, number):
        if not processes.faulty:
            return contextlib.nullcontext({"count": 0, "hit": ""})
        return (memory if kind == MEMORY else calls).failing(kind, folder, number)

    expected = attempt(program, fresh())
    assert expected[1] is None, expected[1]
    killed = fresh()
    attempt(program, killed, KILLED_AT)
    for phase, like, newest in (("start", None, 0), ("resume", killed, EVERY)):
        for kind in kinds:
            counted = fresh(like)
            with failing(kind, counted, 0) as happened:
                attempt(program, counted)
            for number in chosen(processes.same(happened["count"]), most):
                folder = fresh(like)
                before = checkpoints_in(folder)
                with failing(kind, folder, number) as happened:
                    faulted = attempt(program, folder)
                processes.same(None)
                again = attempt(program, folder)
                after = checkpoints_in(folder)
                wrong = wrong_with(faulted, again, expected[0], before, after, kind, newest)
                error = "" if faulted[1] is None else f"{type(faulted[1]).__name__}: {faulted[1]}"
                yield {
                    **{"program": name, "phase": phase, "kind": kind, "number": number},
                    **{"hit": happened["hit"], "error": error, "wrong": wrong},
                }
                processes.same(None)
                if processes.first:
                    shutil.rmtree(folder)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--programs", default="")
    parser.add_argument("--kinds", default="")
    parser.add_argument("--most", type=int, default=None, help="faults of a kind; all without it")
    parser.add_argument("--together", type=int, help="in several processes: which has the faults")
    parser.add_argument("--root", help="where several processes have their folders")
    parser.add_argument("--verbose", action="store_true")
    given = parser.parse_args()
    logging.disable(logging.CRITICAL)
    from fault_programs import PROGRAMS

    names = given.programs.split(",") if given.programs else [*PROGRAMS]
    if "keras_fit" in names:
        import tailrace.keras  # noqa: F401  (first: it chooses Keras' backend)
    processes = Alone() if given.together is None else Several(given.together)
    kinds = given.kinds.split(",") if given.kinds else [*KINDS, MEMORY]
    for name in names:
        counts = collections.Counter(faults=0, raised=0)
        with tempfile.TemporaryDirectory() as root:
            where = Path(given.root or root).resolve()
            for outcome in faults_of(name, given.most, kinds, where, processes):
                reached = bool(outcome["hit"])
                counts["faults"] += reached
                counts["raised"] += reached and bool(outcome["error"])
                if outcome["wrong"] or given.verbose:
                    print(f"FAULT {json.dumps(outcome)}\n", end="", flush=True)
        if processes.faulty:
            print(f"FAULT {json.dumps({'program': name, **counts})}\n", end="", flush=True)


if __name__ == "__main__":
    main()

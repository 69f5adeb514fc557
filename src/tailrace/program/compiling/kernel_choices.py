"""XLA's choices of kernels on a GPU: kept in a file, and used again by later processes.

For a matrix product XLA has several kernels, times them while it compiles, and takes the fastest. The
next process may choose another, which rounds differently. XLA writes all choices of a process to a
file after each compilation, and reads such a file once, before the first. JAX's compilation cache can
keep a file for each fusion instead; some choices are not in those (openxla/xla, issue 37902).

Other platforms have nothing to choose: nothing is read or written there.
"""

# pyright: reportUnknownMemberType=false

from __future__ import annotations

import os
import re
import threading
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import jax

from tailrace.base.messages import note_once

FILE = "autotune.textproto"
"""The file in a directory of checkpoints; XLA writes text for this ending."""

_READ, _WRITE = "xla_gpu_load_autotune_results_from", "xla_gpu_dump_autotune_results_to"

_REFUSED = re.compile("autotun|compile option", re.IGNORECASE)
"""The words by which errors about these options are recognised."""

_kept: ContextVar[tuple[Path, bool] | None] = ContextVar("tailrace_kernel_choices", default=None)


@contextmanager
def choices_in(directory: str | os.PathLike[str] | None, write: bool = False) -> Generator[None]:
    """A context in which programs are compiled with the choices in a directory, if there are any.

    Args:
        directory: a directory of checkpoints; None: each compilation makes its own choices.
        write: whether to add new choices to the file.
    """
    token = _kept.set(None if directory is None else (Path(directory) / FILE, write))
    try:
        yield
    finally:
        _kept.reset(token)


def compiled(
    lowered: jax.stages.Lowered, options: dict[str, Any] | None, platform: str
) -> jax.stages.Compiled:
    """The executable of a lowered program."""
    kept = _kept.get()
    if kept is None or platform not in ("gpu", "cuda"):
        return lowered.compile(options)
    file, write = kept
    # XLA writes in place, and a process that is killed meanwhile would leave half a file.
    # Another thread may compile at the same time. By its name, so that the next process replaces it.
    thread = threading.current_thread().name.replace("/", "-")
    partial = file.with_name(f"new-{thread}-{FILE}")
    more = choice_options(file, partial if write else None)
    try:
        program = lowered.compile({**(options or {}), **more})
    except Exception as error:  # an XLA without these options, an unreadable file
        if not _REFUSED.search(str(error)):
            raise
        note_once(
            f"XLA's choices of kernels are not kept: it was compiled without {str(file)!r} "
            f"({type(error).__name__}: {str(error)[:200]}). A replay in another process may differ by "
            f"rounding."
        )
        return lowered.compile(options)
    else:
        if partial.exists():
            os.replace(partial, file)  # replaced atomically: the process may be killed at any time
        return program
    finally:
        partial.unlink(missing_ok=True)


def choice_options(file: Path, write_to: Path | None) -> dict[str, str]:
    """The options of XLA that read a file of choices, if it exists, and write one."""
    found = {_READ: str(file)} if file.exists() else {}
    return found if write_to is None else {**found, _WRITE: str(write_to)}

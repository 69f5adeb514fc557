"""The only module that uses Orbax: arrays by name and a note, in a directory, written atomically.

Orbax writes to a temporary directory and renames it when it is complete. Here that directory is synced
to disk and renamed again, so that a directory with its final name survives a power failure.
"""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import importlib
import itertools
import json
import math
import os
import shutil
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import numpy as np

from tailrace.base.files import byte_limit, json_checksum, parse_json
from tailrace.devices.processes import distributed
from tailrace.errors import CheckpointError, MissingDependency, VersionError
from tailrace.runs.storage.durable import force_folder, force_tree
from tailrace.trainer.checkpoints.file_list import LISTED, OWN, damage_in, read_whole, write_list
from tailrace.trainer.checkpoints.long_arrays import long_names, read_long, write_long
from tailrace.trainer.checkpoints.proof import (
    DamagedCheckpoint as DamagedCheckpoint,
)
from tailrace.trainer.checkpoints.proof import (
    NotAsWritten,
    judged,
    sentence,
)
from tailrace.trainer.checkpoints.quiet_orbax import quiet, quiet_reading

FORMAT = 2
"""The format version; a later one is refused. A checkpoint without a long history (`long_arrays`) has
version 1, which earlier versions of Tailrace read."""

UNFINISHED = ".unfinished"
"""The suffix of a directory that is being written."""

LIMIT = "TAILRACE_CHECKPOINT_BYTES"
"""The environment variable that raises the limit on what is read."""

UNKNOWN_MEMORY = 1 << 40
"""The limit of the declared size of a checkpoint's arrays where the size of the memory is unknown."""

DISAGREE = "its parts do not agree"
UNKNOWN = "its descriptions cannot be read, or are not those of Tailrace"

Arrays = Mapping[str, np.ndarray]


def import_orbax() -> ModuleType:
    """Import Orbax's version 1 interface, or raise an error that says what to install."""
    for name in ("orbax.checkpoint.v1", "orbax.checkpoint.experimental.v1"):
        try:
            orbax = importlib.import_module(name)
        except ImportError:
            continue
        for needed in ("save", "load", "metadata", "Context"):
            if not callable(getattr(orbax, needed, None)):
                raise VersionError(
                    f"Tailrace does not know this version of Orbax: {name} has no {needed!r}. Use "
                    f"orbax-checkpoint>=0.12.8,<0.13."
                )
        return orbax
    raise MissingDependency(
        "Checkpoints are written with Orbax, which is not installed: "
        "pip install 'tailrace[checkpoint]'."
    )


def write(path: Path, arrays: Arrays, note: Mapping[str, Any], *, replace: bool = False) -> None:
    """Write a checkpoint, which may replace the one of its name; on an error `path` is unchanged."""
    orbax = import_orbax()
    partial = path.with_name(path.name + UNFINISHED)
    with sentence(path, "cannot be written"), quiet():
        long = long_names(arrays)
        said = _description(arrays, note, long)
        # Orbax does not support empty arrays, or a tree without arrays.
        kept = {
            name: np.asarray(array)
            for name, array in arrays.items()
            if array.size and name not in long
        }
        kept = kept or {"nothing": np.zeros(1, np.int8)}
        shutil.rmtree(partial, ignore_errors=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        # Orbax's threads wait for minutes for a directory that cannot be made: try it before.
        tried = partial.with_name(f"{partial.name}.orbax-checkpoint-tmp")
        shutil.rmtree(tried, ignore_errors=True)  # of a process that was killed
        tried.mkdir()
        tried.rmdir()
        try:
            if distributed.process_count() == 1:
                with _plain(orbax):
                    orbax.save(str(partial), kept, custom_metadata=said)
            else:
                _save_alone(partial, kept, said)
            write_long(partial, [arrays[name] for name in long])
            # Before the sync and the rename: the list is part of what is complete or absent.
            write_list(partial)
            force_tree(partial)
            if replace and os.path.lexists(path):
                _replace(partial, path)
            else:
                os.rename(partial, path)
        except BaseException:
            # Now, not at the next start: on a full disk, what was written of this checkpoint is the
            # room that the next one needs. Orbax has a directory of a longer name.
            for left in path.parent.glob(f"{glob.escape(partial.name)}*"):
                shutil.rmtree(left, ignore_errors=True)
            raise
        # The rename itself is an entry in this folder.
        force_folder(path.parent)


def _description(arrays: Arrays, note: Mapping[str, Any], long: list[str]) -> dict[str, Any]:
    """What is saved beside the arrays: our note, their forms and checksums, and its own checksum."""
    forms = {
        name: [list(array.shape), str(array.dtype), checksum(array)]
        for name, array in arrays.items()
    }
    # Through JSON and back before the checksum: tuples become lists there, and the checksum must be
    # of what will be read.
    said = {"format": 1, LISTED: True, "note": json.loads(json.dumps(note)), "arrays": forms}
    said["checksum"] = json_checksum([said["note"], said["arrays"]])
    return said | {"format": FORMAT, "long": long} if long else said


def _replace(partial: Path, path: Path) -> None:
    # Folders cannot be exchanged by one rename everywhere. The old one is removed last.
    before = path.with_name(f"{path.name}.before{UNFINISHED}")
    shutil.rmtree(before, ignore_errors=True)
    os.rename(path, before)
    try:
        os.rename(partial, path)
    except BaseException:
        os.rename(before, path)
        raise
    shutil.rmtree(before, ignore_errors=True)


def _plain(orbax: ModuleType) -> contextlib.AbstractContextManager[Any]:
    """A context without compression.

    Floats hardly become smaller (float32 by 7 %, bfloat16 by 22 %), and it takes twice as long, three
    times the processor time, and memory in each of Orbax's threads that is not returned.
    """
    context = orbax.Context()
    context.array.saving.use_compression = False
    return context


# Orbax has barriers for all processes of a program. Here one of them writes in a thread while all
# train, and each reads alone: so Orbax is configured as if the calling process were the only one.


def _save_alone(path: Path, arrays: Arrays, note: Mapping[str, Any]) -> None:
    """Write from one of several processes; the version 1 interface would involve all of them."""
    import orbax.checkpoint as ocp

    options = ocp.options.MultiprocessingOptions(**_only_this())
    handler = ocp.CompositeCheckpointHandler(
        composite_options=ocp.CompositeOptions(multiprocessing_options=options),
        pytree=ocp.PyTreeCheckpointHandler(use_compression=False, multiprocessing_options=options),
    )
    with ocp.Checkpointer(handler, multiprocessing_options=options) as checkpointer:
        tree = ocp.args.PyTreeSave(dict(arrays))
        checkpointer.save(path, ocp.args.Composite(pytree=tree), custom_metadata=dict(note))


def _alone(orbax: ModuleType) -> contextlib.AbstractContextManager[Any]:
    """A context in which this process reads, independent of the others."""
    if distributed.process_count() == 1:
        return contextlib.nullcontext()
    options = orbax.options.MultiprocessingOptions(**_only_this())
    return orbax.Context(multiprocessing_options=options)


_calls = itertools.count()


def _only_this() -> dict[str, Any]:
    here = distributed.process_index()
    key = f"tailrace-{here}-{next(_calls)}"  # names of barriers must be unique
    return {"primary_host": here, "active_processes": {here}, "barrier_sync_key_prefix": key}


@dataclasses.dataclass(frozen=True)
class Form:
    """The declared shape and dtype of an array in a checkpoint."""

    shape: tuple[int, ...]
    dtype: str
    checksum: int

    @property
    def size(self) -> int:
        """The number of values."""
        return math.prod(self.shape)


def is_checkpoint(path: Path) -> bool:
    """Whether a directory has files of Orbax; a damaged one may have lost some."""
    # Of `os`, which says False where `pathlib` raises: a name that is too long, a closed directory.
    return any(os.path.exists(path / name) for name in ("_CHECKPOINT_METADATA", "pytree"))


def read_note(path: Path) -> tuple[dict[str, Any], dict[str, Form]]:
    """The note of a checkpoint, and the shapes of its arrays; reads no array."""
    orbax = import_orbax()
    with _reading(path, orbax):
        return judged(path, lambda: _read_said(path, orbax)[:2])


def _read_said(path: Path, orbax: Any) -> tuple[dict[str, Any], dict[str, Form], list[str]]:
    """Note, shapes, and the names of the arrays that have files of their own."""
    if damage := damage_in(path):
        raise NotAsWritten(damage)
    said = _said(path)
    version = said["format"]
    # Not damage: the file is whole, and an older checkpoint would not be what was asked for.
    if version not in range(1, FORMAT + 1):
        raise CheckpointError(
            f"The checkpoint {str(path)!r} has format {version!r}; this version of Tailrace reads "
            f"formats up to {FORMAT}. Use the version that wrote it."
        )
    note, forms, long = _parts(said)
    found = orbax.metadata(str(path)).metadata
    if found is None:  # what Orbax could not read, for whatever reason
        raise OSError("Orbax could not read its descriptions of the arrays")
    stored = {name: (tuple(m.shape), str(m.dtype)) for name, m in found.items()}
    padded = [name for name, m in found.items() if _is_padded(m)]
    expected = {
        name: (form.shape, form.dtype)
        for name, form in forms.items()
        if form.size and name not in long
    }
    if padded or (expected and stored != expected):
        raise NotAsWritten(DISAGREE)
    _check_size(path, forms)
    return note, forms, long


def _said(path: Path) -> dict[str, Any]:
    """What Tailrace wrote into Orbax's description of a checkpoint: our note, and about the arrays."""
    # Read here, not by Orbax, to which what it could not read is empty.
    try:
        content = read_whole(path / OWN)
    except FileNotFoundError:
        raise NotAsWritten(f"the file {OWN!r} is missing") from None
    try:
        said = parse_json(content)["custom_metadata"]
        written, now = said.get("checksum"), json_checksum([said["note"], said["arrays"]])
        said["format"]
    except (ValueError, LookupError, TypeError, AttributeError):
        raise NotAsWritten(UNKNOWN) from None
    # Everything except the arrays: step, seed, position, the arrays' own checksums.
    if written not in (None, now):
        raise NotAsWritten(DISAGREE)
    return said


def _parts(said: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Form], list[str]]:
    try:
        forms = {
            name: Form(tuple(int(n) for n in shape), str(dtype), int(checksum))
            for name, (shape, dtype, checksum) in said["arrays"].items()
        }
        note, long = dict(said["note"]), [str(name) for name in said.get("long", [])]
    except (ValueError, TypeError, AttributeError):
        raise NotAsWritten(UNKNOWN) from None
    if not forms.keys() >= set(long):
        raise NotAsWritten(DISAGREE)
    return note, forms, long


@contextlib.contextmanager
def _reading(path: Path, orbax: Any) -> Iterator[None]:
    with quiet_reading(path), _alone(orbax):
        yield


class _Described(Protocol):
    """An array in Orbax's metadata."""

    shape: tuple[int, ...]


def _is_padded(described: _Described) -> bool:
    """Whether the chunks of an array are larger than it is: memory is taken for whole chunks."""
    stored = getattr(described, "storage_metadata", None)
    chunks = [getattr(stored, name, None) for name in ("chunk_shape", "write_shape")]
    return any(
        own > max(1, size)
        for chunk in filter(None, chunks)
        for own, size in zip(chunk, described.shape, strict=True)
    )


def read(path: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """All arrays of a checkpoint by name, and its note."""
    orbax = import_orbax()
    with _reading(path, orbax):
        return judged(path, lambda: _read(path, orbax))


def check(path: Path) -> str:
    """Read every byte of a checkpoint, and say what it is; raises what `read` does."""
    arrays, note = read(path)
    with sentence(path, "cannot be read", reading=True):
        if damage := damage_in(path, every_byte=True):
            raise DamagedCheckpoint(f"The checkpoint {str(path)!r} is damaged: {damage}.")
    size = sum(array.nbytes for array in arrays.values())
    return f"step {note.get('step')}, {len(arrays)} arrays, {size:,} bytes"


def _read(path: Path, orbax: Any) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    note, forms, long = _read_said(path, orbax)
    here = any(form.size for name, form in forms.items() if name not in long)
    loaded = dict(orbax.load(str(path))) if here else {}
    for number, name in enumerate(long):
        form = forms[name]
        loaded[name] = read_long(path, number, form.shape, _dtype(form.dtype))
    arrays = {
        name: np.asarray(loaded[name]) if form.size else np.zeros(form.shape, _dtype(form.dtype))
        for name, form in forms.items()
    }
    # The bytes of large files are checked here only, array by array, once they are in memory.
    for name, form in forms.items():
        found = Form(arrays[name].shape, str(arrays[name].dtype), checksum(arrays[name]))
        if found != form:
            raise NotAsWritten(f"array {name!r} is not what was written")
    return arrays, note


def checksum(array: object) -> int:
    """A checksum of an array's bits."""
    return zlib.crc32(np.ascontiguousarray(array).view(np.uint8).reshape(-1).data)


def remove(path: Path) -> None:
    """Remove a checkpoint atomically: renamed first, so that no partial one has its name."""
    partial = path.with_name(path.name + UNFINISHED)
    shutil.rmtree(partial, ignore_errors=True)
    # A rename that fails leaves the checkpoint whole: it is superseded, and does no harm.
    with contextlib.suppress(OSError):
        os.rename(path, partial)
    shutil.rmtree(partial, ignore_errors=True)


def _check_size(path: Path, forms: Mapping[str, Form]) -> None:
    claimed = sum(form.size * _dtype(form.dtype).itemsize for form in forms.values())
    most = byte_limit(LIMIT, os.environ.get(LIMIT), _memory(), "the arrays of a checkpoint")
    if claimed > most:
        raise CheckpointError(
            f"The checkpoint {str(path)!r} says that its arrays take {claimed:,} bytes, which is more "
            f"than the limit of {most:,}. If that is right, set {LIMIT}={claimed}."
        )


def _memory() -> int:
    """The bytes of memory of this machine."""
    # All arrays are read into it: a few compressed bytes may claim more than there is.
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):  # not a POSIX system
        return UNKNOWN_MEMORY


def _dtype(name: str) -> np.dtype:
    import jax.numpy as jnp

    try:
        return np.dtype(jnp.dtype(name))
    except TypeError:
        raise CheckpointError(f"A checkpoint has no arrays of dtype {name!r}.") from None

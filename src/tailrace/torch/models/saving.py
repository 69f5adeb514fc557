"""A model's state in a file of plain arrays: weights, buffers, optimizer state, the step count.

The file is a NumPy archive with one array per tensor and a JSON note. It contains no code, so untrusted
files are safe to read.
"""

from __future__ import annotations

import json
import math
import os
import pathlib
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import IO, Any, BinaryIO

import jax.numpy as jnp
import numpy as np

from tailrace._version import __version__
from tailrace.base.files import open_regular, parse_json, read_limit, too_large, whole_file
from tailrace.base.messages import shown
from tailrace.base.paths import in_words
from tailrace.errors import RunError, TailraceError

_NOTE = "tailrace.json"
_BITS = {"bfloat16": (np.uint16, jnp.bfloat16)}


class UnreadableModel(RunError):
    """A saved model cannot be read now, which does not say that it is damaged."""


def write_state(
    path: str | os.PathLike[str], trees: Mapping[str, Any], note: Mapping[str, Any]
) -> pathlib.Path:
    """Write trees of arrays by name, atomically."""
    target = pathlib.Path(path)
    if os.path.isdir(target):
        raise RunError(f"A model is saved in a file. Received a directory: {str(target)!r}.")
    arrays: dict[str, np.ndarray] = {}
    dtypes: dict[str, str] = {}
    for kind, tree in trees.items():
        for name, value in flat(tree).items():
            array = np.asarray(value)
            dtypes[f"{kind}/{name}"] = str(array.dtype)
            # NumPy's format has no bfloat16: it would be read back as raw bytes of no dtype.
            if str(array.dtype) in _BITS:
                array = array.view(_BITS[str(array.dtype)][0])
            arrays[f"{kind}/{name}"] = array
    # As one more array: a single file, which is read without pickle.
    text = json.dumps({"version": __version__, "dtypes": dtypes, **note})
    arrays[_NOTE] = np.frombuffer(text.encode(), np.uint8)
    # Renamed at the end: a crash leaves the old file, not half of a new one.
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(target) as file:
            np.savez(file, allow_pickle=False, **arrays)  # type: ignore[arg-type]
    except OSError as error:
        raise RunError(f"The model {str(target)!r} cannot be written: {in_words(error)}") from error
    except MemoryError as error:
        raise RunError(
            f"The model {str(target)!r} cannot be written: {error or 'there is no memory left'}. Free "
            f"memory, and save it again."
        ) from error
    return target


def read_state(
    path: str | os.PathLike[str], note_kinds: Mapping[str, type | tuple[type, ...]] | None = None
) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """The trees of a file, and its note.

    Args:
        path: the file.
        note_kinds: the required entries of the note, with their types.
    """
    if not isinstance(path, str | os.PathLike):
        raise RunError(f"A model is loaded from the path of a file. Received: {path!r}.")
    with _reading(path), open_regular(path, RunError) as file:
        arrays = _read_arrays(file)
        note = parse_json(arrays.pop(_NOTE).tobytes())
        _check_note(note, note_kinds or {})
        return _as_trees(arrays, note["dtypes"]), note


def read_note(
    path: str | os.PathLike[str], note_kinds: Mapping[str, type | tuple[type, ...]] | None = None
) -> dict[str, Any]:
    """The note of a file, without its arrays; arguments as for `read_state`."""
    with _reading(path), open_regular(path, RunError) as file:
        note = parse_json(_read_arrays(file, only=_NOTE)[_NOTE].tobytes())
        _check_note(note, note_kinds or {})
        return note


@contextmanager
def _reading(path: str | os.PathLike[str]) -> Iterator[None]:
    try:
        yield
    except TailraceError:
        raise
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
        text = f"The model {str(path)!r} cannot be read: {in_words(error, reading=True)}"
        raise RunError(text) from error
    # A disk that does not answer, and memory that is short, say nothing of the file.
    except OSError as error:
        text = f"The model {str(path)!r} cannot be read: {in_words(error, reading=True)}"
        raise UnreadableModel(text) from error
    except MemoryError as error:
        text = f"The model {str(path)!r} cannot be read: {error or 'there is no memory left'}."
        raise UnreadableModel(f"{text} Free memory, and load it again.") from error
    except Exception as error:  # a damaged archive can raise many kinds of errors
        reason = " ".join(shown(str(error)).split())[:200]
        raise RunError(
            f"{str(path)!r} is not a model saved by model.save(path), or it is damaged "
            f"({type(error).__name__}: {reason})."
        ) from error


def _read_arrays(file: BinaryIO, only: str | None = None) -> dict[str, np.ndarray]:
    """The arrays of an archive; what each declares fits the file before memory is taken."""
    limit, total = read_limit(), 0
    size = os.fstat(file.fileno()).st_size
    found: dict[str, np.ndarray] = {}
    with zipfile.ZipFile(file) as archive:
        for member in archive.infolist():
            # `np.savez` does not compress: a compressed member is not ours, and could unpack to any
            # size.
            if member.compress_type != zipfile.ZIP_STORED or member.file_size > size:
                raise ValueError(f"{member.filename!r} is compressed, or larger than the file")
            total += member.file_size
            if total > min(size, limit):
                raise too_large("A saved model", total, min(size, limit), RunError)
            name = member.filename.removesuffix(".npy")
            if only in (None, name):
                with archive.open(member) as content:
                    found[name] = _read_array(content, member)
    return found


def _read_array(content: IO[bytes], member: zipfile.ZipInfo) -> np.ndarray:
    version = np.lib.format.read_magic(content)
    read_header = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }.get(version)
    if read_header is None:
        raise ValueError(f"{member.filename!r} has an array format of version {version}")
    shape, fortran, dtype = read_header(content)
    rest = content.read()  # all of it, because only then the checksum is verified
    expected = math.prod(shape) * dtype.itemsize
    if dtype.hasobject or min(shape, default=0) < 0 or expected != len(rest):
        raise ValueError(f"{member.filename!r} declares {dtype} {shape} and has {len(rest)} bytes")
    # A copy, because `frombuffer` shares read-only memory.
    values = np.frombuffer(rest, dtype).copy()
    return values.reshape(shape[::-1]).T if fortran else values.reshape(shape)


def _check_note(note: object, kinds: Mapping[str, type | tuple[type, ...]]) -> None:
    for name, kind in {"dtypes": dict, **kinds}.items():
        value = note.get(name) if isinstance(note, dict) else None
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is int):
            raise ValueError(f"its note says {name}={value!r}")


def _as_trees(arrays: Mapping[str, np.ndarray], dtypes: Mapping[str, str]) -> dict[str, Any]:
    found: dict[str, np.ndarray] = {}
    for name, array in arrays.items():
        dtype = dtypes[name]
        if dtype in _BITS:
            bits, own = _BITS[dtype]
            if array.dtype != bits:
                raise ValueError(f"{name!r} holds {array.dtype} and is said to be {dtype}")
            array = array.view(own)
        found[name] = array
    return nested(found)


def nested(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Trees of arrays, from their names: the inverse of `flat`."""
    trees: dict[str, dict[str, Any]] = {}
    for name, array in arrays.items():
        kind, _, rest = name.partition("/")
        *around, last = rest.split("/")
        place = trees.setdefault(kind, {})
        for part in around:
            place = place.setdefault(part, {})
            if not isinstance(place, dict):
                raise ValueError(f"{name!r} is an array inside another")
        if last in place:
            raise ValueError(f"{name!r} is there twice")
        place[last] = array
    return trees


def flat(tree: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """The arrays of nested dicts, by path.

    >>> flat({"a": {"b": 1}, "c": 2})
    {'a/b': 1, 'c': 2}
    """
    found: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping):
            found.update(flat(value, f"{before}{name}/"))
        else:
            found[f"{before}{name}"] = value
    return found


def check_same_form(saved: Mapping[str, Any], own: Mapping[str, Any], what: str) -> None:
    """Refuse arrays that do not fit the model."""
    saved, own = flat(saved), flat(own)
    if saved.keys() != own.keys():
        missing, more = sorted(own.keys() - saved.keys()), sorted(saved.keys() - own.keys())
        raise RunError(
            f"A saved model fits a module with the same {what}. Missing in the file: "
            f"{missing or 'none'}. Only in the file: {more or 'none'}."
        )
    for name, value in own.items():
        if np.shape(saved[name]) != np.shape(value):
            raise RunError(
                f"A saved model fits a module with the same {what}. {name!r} is "
                f"{list(np.shape(value))} here and {list(np.shape(saved[name]))} in the file."
            )
        here, there = _dtype_name(value), _dtype_name(saved[name])
        if here != there:
            raise RunError(
                f"A saved model fits a module with the same {what}. {name!r} is {here} here and "
                f"{there} in the file. Convert the module, for example module.to(torch.{there})."
            )


def _dtype_name(array: object) -> str:
    return str(getattr(array, "dtype", np.asarray(array).dtype)).removeprefix("torch.")

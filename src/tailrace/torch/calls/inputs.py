"""The arguments of a call: bound, checked against the compiled form, and cut into microbatches.

The first call fixes the form. Tensors become inputs of the program, cut along dim 0 into microbatches:
rows ((i * accumulation + m) * replicas + r) * B onwards belong to iteration i, microbatch m, replica
r. Everything that is not a tensor is a constant of the program and must not change.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import torch

from tailrace.base.messages import note_once
from tailrace.base.trees import Tree
from tailrace.errors import DataError
from tailrace.feeds.elements import ElementSpec
from tailrace.torch.calls.arrays import dtype_on_device, is_resident, rows_of
from tailrace.torch.calls.containers import (
    fields_beside,
    flatten,
    held_elsewhere,
    is_custom,
    is_dataclass,
    rebuild,
)
from tailrace.torch.errors import CallError, UsageError

_ADVICE = (
    " The model was compiled for other arguments. Call destroy() on it to compile it again for "
    "these, or wrap the module once more."
)


class _Slot:
    """A placeholder for a tensor in a structure of arguments."""

    def __repr__(self) -> str:
        return "tensor"


_SLOT = _Slot()


class CallForm:
    """The form of a call: its tensors, their shapes, and their positions in the arguments.

    Args:
        forward: the called function; its signature binds the arguments.
        args: positional arguments of the first call.
        kwargs: its keyword arguments.
        pieces: the number of microbatches of a call.

    Attributes:
        names: the names of the tensors.
        shapes: their shapes and dtypes.
        resident: whether those of the first call are on the device already.
    """

    def __init__(
        self, forward: Callable[..., Any], args: Tree, kwargs: dict[str, Any], pieces: int
    ) -> None:
        self.pieces = pieces
        self._signature = inspect.signature(forward)
        given = self._bind(args, kwargs)
        # Two forms of the same arguments: as forward is called, and by name, as later calls are
        # compared.
        self._template = rebuild(_packed(given), _without_tensor)
        self._named = {name: rebuild(v, _without_tensor) for name, v in given.arguments.items()}
        # Otherwise the first call's values would be used in all later ones, silently.
        if hidden := held_elsewhere(dict(given.arguments), _is_tensor):
            attribute, kind = hidden
            raise CallError(
                f"A call takes tensors, alone or in tuples, lists, dicts, named tuples and "
                f"dataclasses. Received: a {kind.__name__}, which holds tensors in {attribute!r}: they "
                f"would be constants of the program. Give the tensors themselves, or say how a "
                f"{kind.__name__} is taken apart: tt.register_container({kind.__name__}, parser)."
            )
        leaves = [leaf for name, value in given.arguments.items() for leaf in flatten(value, name)]
        tensors = [(path, v) for path, v in leaves if isinstance(v, torch.Tensor)]
        # A call without tensors still has microbatches: an empty row for each.
        self._empty = not tensors
        tensors = tensors or [("nothing", torch.zeros(pieces, dtype=torch.int8))]
        self.names = [path for path, _ in tensors]
        self.shapes = [(tuple(t.shape), t.dtype) for _, t in tensors]
        self.resident = all(is_resident(t) for _, t in tensors)
        self._check_divisible([t for _, t in tensors])
        # The common case has a short path in `tensors_of`: binding a signature costs more than
        # comparing shapes.
        self._all_positional = not kwargs and all(isinstance(a, torch.Tensor) for a in args)

    # -- the element of one microbatch ----------------------------------------------------------

    def spec(self) -> ElementSpec:
        """The spec of the tensors of one microbatch, by name."""
        shapes = {
            name: jax.ShapeDtypeStruct(self._cut(shape), dtype_on_device(dtype))
            for name, (shape, dtype) in zip(self.names, self.shapes, strict=True)
        }
        leaves, structure = jax.tree_util.tree_flatten_with_path(shapes)
        return ElementSpec(
            structure,
            tuple(leaf for _, leaf in leaves),
            tuple(jax.tree_util.keystr(path) for path, _ in leaves),
            tuple(np.dtype(leaf.dtype) for _, leaf in leaves),
        )

    def examples(self) -> list[torch.Tensor]:
        """Tensors of the form of one microbatch, in the order of `names`."""
        return [torch.zeros(self._cut(shape), dtype=dtype) for shape, dtype in self.shapes]

    def arguments(
        self, element: dict[str, Any], wrap: Callable[[Any], Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of forward, with the arrays of an element instead of the tensors."""
        # In the order of `names`, in which `rebuild` meets the placeholders.
        values = iter([wrap(element[name]) for name in self.names])
        args, kwargs = rebuild(self._template, lambda v: next(values) if v is _SLOT else v)
        return args, kwargs

    def blocks(self, tensors: Sequence[torch.Tensor]) -> list[Any]:
        """Arrays of a whole call, [microbatches, *microbatch], in the spec's order."""
        found = {}
        if self._empty:
            tensors = [torch.zeros(self.pieces, dtype=torch.int8)]
        for name, tensor, (shape, _) in zip(self.names, tensors, self.shapes, strict=True):
            found[name] = rows_of(tensor, (self.pieces, *self._cut(shape)))
        # JAX flattens a dict by its sorted keys: the spec has this order.
        return [found[name] for name in sorted(found)]

    def _cut(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (shape[0] // self.pieces, *shape[1:]) if self.pieces > 1 else shape

    # -- checking -------------------------------------------------------------------------------

    def tensors_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
        """The tensors of a call, after checking that it fits the compiled form."""
        if not kwargs and self._all_positional and len(args) == len(self.shapes):
            # The short path of most calls: nothing is bound or flattened.
            found = [(tuple(a.shape), a.dtype) if isinstance(a, torch.Tensor) else 0 for a in args]
            if found == self.shapes:
                return list(args)
        return self._compare_arguments(self._bind(args, kwargs).arguments)

    def _bind(self, args: Sequence[Any], kwargs: dict[str, Any]) -> inspect.BoundArguments:
        try:
            return self._signature.bind(*args, **kwargs)
        except TypeError as error:
            raise self._unbound(error, args, kwargs) from None

    def _unbound(self, error: TypeError, args: Tree, kwargs: dict[str, Any]) -> Exception:
        text, parameters = str(error), self._signature.parameters
        takes = f"It takes {self._signature}."
        if "missing a required" in text:
            name = text.rsplit("'", 2)[-2]
            return CallError(f"Mandatory parameter {name} missing. {takes}")
        if "multiple values" in text:
            return UsageError(f"{text}: it is given twice. {takes}")
        if "unexpected keyword" in text:
            wrong = next(name for name in kwargs if name not in parameters)
            return UsageError(f"{wrong} is not a valid parameter. {takes}")
        return UsageError(f"Too many arguments provided: {len(args)}. {takes}")

    def _compare_arguments(self, arguments: dict[str, Any]) -> list[torch.Tensor]:
        """The tensors of arguments that match the compiled form, in the order of the first call, whose
        dicts may have had another order of keys."""
        # By name, in the order of the signature: positional and keyword arguments may be exchanged.
        if list(arguments) != list(self._named):
            if len(arguments) != len(self._named):
                raise CallError(
                    f"Number of positional arguments mismatch: expected {len(self._named)} arguments "
                    f"but got {len(arguments)} (first {', '.join(self._named) or 'none'}; now "
                    f"{', '.join(arguments) or 'none'}).{_ADVICE}"
                )
            raise CallError(self._keys("the arguments", self._named, arguments))
        shapes = iter(self.shapes)
        tensors: list[torch.Tensor] = []
        for name, value in arguments.items():
            self._compare(name, self._named[name], value, shapes, tensors)
        return tensors

    def _compare(
        self, name: str, expected: Tree, found: Tree, shapes: Tree, tensors: list[torch.Tensor]
    ) -> None:
        if expected is _SLOT:
            shape, dtype = next(shapes)
            if not isinstance(found, torch.Tensor):
                raise CallError(
                    f"Type mismatch for {name}: expected a tensor but got "
                    f"{type(found).__name__}.{_ADVICE}"
                )
            if found.dtype != dtype:
                raise CallError(
                    f"Data type mismatch for {name}: expected {dtype} but got {found.dtype}.{_ADVICE}"
                )
            if tuple(found.shape) != shape:
                # First the more helpful message, if the batch is the reason.
                self._check_divisible([found])
                raise CallError(
                    f"Shape mismatch for {name}: expected {torch.Size(shape)} but got "
                    f"{found.shape}.{_ADVICE}"
                )
            tensors.append(found)
            return
        if isinstance(found, torch.Tensor) or type(expected) is not type(found):
            raise CallError(
                f"Type mismatch for {name}: expected {type(expected).__name__} but got "
                f"{type(found).__name__}.{_ADVICE}"
            )
        if isinstance(expected, dict):
            if set(expected) != set(found):
                raise CallError(self._keys(name, expected, found))
            for key in expected:
                self._compare(f"{name}.{key}", expected[key], found[key], shapes, tensors)
            self._compare_fields(name, expected, found, shapes, tensors)
        elif isinstance(expected, tuple | list):
            if len(expected) != len(found):
                raise CallError(
                    f"Length mismatch for {name}: expected {len(expected)} but got "
                    f"{len(found)}.{_ADVICE}"
                )
            for number, (a, b) in enumerate(zip(expected, found, strict=True)):
                self._compare(f"{name}.{number}", a, b, shapes, tensors)
        elif is_custom(expected):
            pairs = zip(flatten(expected), flatten(found), strict=False)
            for number, ((_, a), (_, b)) in enumerate(pairs):
                self._compare(f"{name}.{number}", a, b, shapes, tensors)
        elif is_dataclass(expected):
            self._compare_fields(name, expected, found, shapes, tensors)
        elif not _same_constant(expected, found):
            arrays = isinstance(expected, np.ndarray)
            advice = f" Give tensors: torch.from_numpy({name})." if arrays else _ADVICE
            raise CallError(
                f"Value mismatch for {name}: expected {expected} but got {found}. What is not a "
                f"tensor is a constant of the program.{advice}"
            )

    def _compare_fields(
        self, name: str, expected: Tree, found: object, shapes: Tree, tensors: list[torch.Tensor]
    ) -> None:
        ours, theirs = fields_beside(expected), fields_beside(found)
        if list(ours) != list(theirs):
            raise CallError(self._keys(name, ours, theirs))
        for field in ours:
            self._compare(f"{name}.{field}", ours[field], theirs[field], shapes, tensors)

    @staticmethod
    def _keys(name: str, expected: Tree, found: Tree) -> str:
        parts = []
        if more := [str(k) for k in found if k not in expected]:
            parts.append(f"Unexpected arguments: {', '.join(more)}")
        if missing := [str(k) for k in expected if k not in found]:
            parts.append(f"Missing arguments: {', '.join(missing)}")
        return f"Keys mismatch for {name}: {'; '.join(parts) or 'other order'}.{_ADVICE}"

    def _check_divisible(self, tensors: Sequence[torch.Tensor]) -> None:
        for name, tensor in zip(self.names, tensors, strict=False):
            if 0 in tensor.shape:
                raise DataError(
                    f"Zero-sized tensors are unsupported (Got shape {list(tensor.shape)}): {name}."
                )
            rows = tensor.shape[0] if tensor.ndim else 1
            if rows % self.pieces:
                raise UsageError(
                    f"Invalid batch dimension: In the input {name}, the batch dimension ({rows}) "
                    f"must be a multiple of device_iterations x replicas x accumulation = "
                    f"{self.pieces}, because one call runs that many microbatches. Give "
                    f"{max(1, rows // self.pieces) * self.pieces} rows, or use tt.DataLoader, which "
                    f"combines batches."
                )
            if tensor.requires_grad:
                note_once(
                    f"The input {name} requires a gradient. It is detached: no gradient flows out of "
                    f"a compiled model.",
                    key=f"detached input {name}",
                )


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


def _same_constant(one: object, other: object) -> bool:
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(
            one, other, equal_nan=one.dtype.kind in "fc"
        )
    nothing = one != one and other != other  # not a number
    return one is other or bool(one == other) or bool(nothing)


def _packed(given: inspect.BoundArguments) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return given.args, given.kwargs


def _without_tensor(value: object) -> Any:
    return _SLOT if isinstance(value, torch.Tensor) else value

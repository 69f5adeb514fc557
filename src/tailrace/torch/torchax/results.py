"""The shape and dtype of PyTorch's results, found by running the function without values.

A lowering follows JAX's rules of promotion, and may not support `dtype=` and `out=`. So each result is
compared with that of PyTorch's function on tensors without values: another dtype is cast, another
shape is refused. `out=` is removed before the function runs, and the result is written to it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch
import torch.nn.functional as functional
from torch.utils import _mode_utils as modes

from tailrace.base.array_like import DTypeLike, TensorLike
from tailrace.base.trees import Tree
from tailrace.torch.calls.arrays import dtype_on_device
from tailrace.torch.calls.containers import flatten, rebuild

aten = torch.ops.aten


@contextlib.contextmanager
def plainly() -> Iterator[None]:
    """A context with plain PyTorch, without tracing modes."""
    with modes.no_dispatch(), torch._C.DisableTorchFunction():
        yield


def expected(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """PyTorch's result, as tensors without values; None if it is unknown."""
    # All of it is on "meta".
    kwargs = {name: value for name, value in kwargs.items() if name != "device"}
    try:
        return _on_meta(func, args, kwargs)
    except Exception:  # kernels that need values, and arguments that the lowering refuses
        return None


def _on_meta(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    # "meta" tensors have shapes and dtypes but no memory: PyTorch's own kernels say what they would
    # return.
    with plainly(), torch.device("meta"):
        args, kwargs = rebuild((args, kwargs), _without_values)
        return func(*args, **kwargs)


def asks_of_dtypes(func: Callable[..., Any]) -> bool:
    """Whether an operation depends only on dtypes, such as `torch.can_cast`."""
    return getattr(func, "overloadpacket", None) in _QUESTIONS


_QUESTIONS = frozenset({aten.can_cast, aten.promote_types, aten.result_type})


def _without_values(value: object) -> Any:
    if isinstance(value, torch.device):
        return torch.device("meta")
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty(tuple(value.shape), dtype=as_wide(value.dtype), device="meta")


def as_wide(dtype: torch.dtype) -> torch.dtype:
    """A dtype of the program as the user's: integers of 64 bits have 32 on devices."""
    if dtype == torch.int32 and not jax.config.jax_enable_x64:  # type: ignore[attr-defined]
        return torch.int64  # most likely, and the only one that indices may have
    return dtype


def corrected(
    func: Callable[..., Any], args: Tree, kwargs: Tree, found: Tree, tensor: Callable[[Any], Any]
) -> Any:
    """A result in PyTorch's dtypes; refused where its shape is another.

    Args:
        func: the function.
        args: its arguments.
        kwargs: its keyword arguments.
        found: what its lowering returned.
        tensor: a JAX value as a tensor.
    """
    ours = [leaf for _, leaf in flatten(found) if isinstance(leaf, torch.Tensor)]
    given = {id(leaf) for _, leaf in flatten((args, kwargs))}
    if not ours or any(id(leaf) in given or not hasattr(leaf, "_elem") for leaf in ours):
        return found  # changed in place, or a slice
    wanted = expected(func, args, kwargs)
    theirs = [leaf for _, leaf in flatten(wanted) if isinstance(leaf, torch.Tensor)]
    # Unknown to PyTorch's meta kernels, or a structure of another kind: nothing to compare with.
    if len(ours) != len(theirs):
        return found
    for mine, one in zip(ours, theirs, strict=True):
        if tuple(mine.shape) != tuple(one.shape) and not _counted_in_bits(func):
            raise NotImplementedError(
                f"{name_of(func)} has no lowering for these arguments (it would return the shape "
                f"{list(mine.shape)} instead of {list(one.shape)})"
            )
    # By identity, because results may be nested in containers of any kind.
    by_id = dict(zip(map(id, ours), theirs, strict=True))

    def cast(leaf: TensorLike) -> Any:
        one = by_id.get(id(leaf))
        dtype = None if one is None else dtype_on_device(one.dtype)
        same = dtype is None or leaf._elem.dtype == dtype
        return leaf if same else tensor(as_dtype(leaf._elem, dtype))

    return _with_names(rebuild(found, cast), wanted)


def _with_names(found: Tree, wanted: Tree) -> Any:
    """Several results as PyTorch names them (`torch.return_types`), where a lowering has a tuple."""
    named = type(wanted)
    other = isinstance(found, tuple | list) and type(found) is not named
    other = other and issubclass(named, tuple) and named is not tuple
    return named(found) if other and len(found) == len(wanted) else found


def as_dtype(array: TensorLike, dtype: DTypeLike) -> Any:
    """Cast as PyTorch casts."""
    if jnp.iscomplexobj(array) and not jnp.issubdtype(dtype, jnp.complexfloating):
        array = array.real
    whole = jnp.issubdtype(dtype, jnp.integer)
    if whole and jnp.dtype(dtype).itemsize < 4 and jnp.issubdtype(array.dtype, jnp.floating):
        # Whole numbers that do not fit wrap around (-1.0 becomes 255), where JAX takes the nearest.
        array = array.astype(jnp.int32)
    return array.astype(dtype)


# -- numbers --------------------------------------------------------------------------------------


def number_as(value: complex, dtype: torch.dtype) -> complex:
    """A Python number as a tensor of this dtype holds it, by PyTorch, which refuses what does not fit.

    JAX would take the nearest number that does.
    """
    # Wider ones hold every number that users write, except floats in integers. JAX refuses integers of
    # more than 32 bits itself.
    narrow = dtype.itemsize < 4
    if not narrow and (dtype.is_floating_point or dtype.is_complex or isinstance(value, int)):
        return value
    with plainly():
        return torch.empty((), dtype=dtype, device="cpu").fill_(value).item()


_STORED: dict[Any, int] = {
    aten.constant_pad_nd: 2,
    aten.fill: 1,
    aten.fill_: 1,
    aten.full: 1,
    aten.full_like: 1,
    aten.index_fill: 3,
    aten.index_fill_: 3,
    aten.masked_fill: 2,
    aten.masked_fill_: 2,
    aten.new_full: 2,
    aten.scalar_tensor: 0,
    aten.scatter: 3,
    aten.scatter_: 3,
    functional.pad: 3,
    torch.full: 1,
}
"""Operations that store a number in a tensor, and its place among their arguments."""


def with_numbers_stored(
    func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Any, Any]:
    """The arguments, with the number that an operation stores as the tensor will hold it."""
    place = _STORED.get(getattr(func, "overloadpacket", func))
    dtype = kwargs.get("dtype") or getattr(args[0] if args else None, "dtype", None)
    if place is None or dtype is None:
        return args, kwargs

    def stored(value: object) -> Any:
        return number_as(value, dtype) if isinstance(value, int | float | complex) else value

    args = [stored(value) if number == place else value for number, value in enumerate(args)]
    named = {
        name: stored(value) if name in ("value", "fill_value") else value
        for name, value in kwargs.items()
    }
    return args, named


def check_cast(
    plain: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> None:
    """Refuse an in-place operation whose result has another kind of numbers, such as `x += 0.5` for
    integers; PyTorch does, and a cast would lose digits silently.

    Args:
        plain: the operation that returns its result instead.
        args: the arguments, of which the first is written.
        kwargs: the keyword arguments.
    """
    # What stores a value (`fill_`, `copy_`) is of the tensor's dtype, and casts.
    if not is_pointwise(plain) or args[0].is_floating_point():
        return
    wanted = expected(plain, args, kwargs)
    if isinstance(wanted, torch.Tensor) and not torch.can_cast(wanted.dtype, args[0].dtype):
        raise RuntimeError(_uncastable(wanted.dtype, args[0].dtype))


_POINTWISE = frozenset({aten._prelu_kernel, aten.floor_divide, aten.rsub})
"""Functions of each entry that PyTorch does not call so."""


def is_pointwise(func: Callable[..., Any]) -> bool:
    """Whether an operation computes each entry by itself, of arguments that are broadcast."""
    packet = getattr(func, "overloadpacket", None)
    return torch.Tag.pointwise in getattr(func, "tags", ()) or packet in _POINTWISE


def is_in_place(func: torch._ops.OpOverload) -> bool:
    """Whether an operation writes into its first argument (`add_`, and not `__and__`)."""
    name = func.overloadpacket.__name__
    return name.endswith("_") and not name.endswith("__")


def _counted_in_bits(func: Callable[..., Any]) -> bool:
    """Whether shapes follow from how wide a dtype is, which integers are not here."""
    return name_of(func).split("::")[-1].startswith("view")


def name_of(func: Callable[..., Any]) -> str:
    """The name of a function, such as aten::add.Tensor."""
    known = isinstance(func, torch._ops.OpOverload)
    return func.name() if known else getattr(func, "__name__", str(func))


# -- dtype= ---------------------------------------------------------------------------------------


@functools.cache
def _place_of_dtype(func: Callable[..., Any]) -> int | None:
    """Where a function takes the dtype that it computes in; None where it takes none."""
    overloads = [func] if isinstance(func, torch._ops.OpOverload) else []
    if not overloads:
        # A function that is seen before it is dispatched; its operation mostly has the same name.
        packet = getattr(aten, getattr(func, "__name__", ""), None)
        known = isinstance(packet, torch._ops.OpOverloadPacket)
        overloads = [getattr(packet, name) for name in packet.overloads()] if known else []
    for one in overloads:
        arguments = {argument.name: number for number, argument in enumerate(one._schema.arguments)}
        # Those with a layout make tensors; a view reads its bits as another dtype.
        makes = "layout" in arguments or one.overloadpacket.__name__.startswith(
            ("view", "_to", "to")
        )
        first = str(one._schema.arguments[0].type) if arguments else ""
        if "dtype" in arguments and first == "Tensor" and not makes:
            return arguments["dtype"]
    return None


def cast_first(
    func: Callable[..., Any], args: Tree, kwargs: Tree, to: Callable[..., Any]
) -> tuple[Any, Any]:
    """The arguments of a sum, a softmax and their like in the dtype asked for: `dtype=` is the dtype
    that they compute in, not only that of the result."""
    number = _place_of_dtype(func)
    if number is None or not args or not isinstance(args[0], torch.Tensor):
        return args, kwargs
    dtype = kwargs.get("dtype", args[number] if len(args) > number else None)
    if not isinstance(dtype, torch.dtype) or args[0].is_complex():
        return args, kwargs
    rest = [None if n == number else value for n, value in enumerate(args)][1:]
    kwargs = {name: value for name, value in kwargs.items() if name != "dtype"}
    return (to(args[0], dtype), *rest), kwargs


# -- out= -----------------------------------------------------------------------------------------


def has_traced(value: object) -> bool:
    """Whether there is a tensor of the program in nested containers."""
    return any(hasattr(leaf, "jax") for _, leaf in flatten(value))


def is_written_here(out: TensorLike) -> bool:
    """Whether `out=` is of tensors of the program; those of the host are PyTorch's business."""
    return all(hasattr(leaf, "jax") for _, leaf in flatten(out))


def written(out: TensorLike, found: object, tensor: Callable[[Any], Any]) -> Any:
    """Write a result into `out=`, which takes its shape but keeps its own dtype; returns `out`, with
    PyTorch's names for several."""
    places = [leaf for _, leaf in flatten(out)]
    values = [leaf for _, leaf in flatten(found)]
    for place, value in zip(places, values, strict=True):
        if not torch.can_cast(value.dtype, place.dtype):
            raise RuntimeError(_uncastable(value.dtype, place.dtype))
        array = as_dtype(value.jax(), place.jax().dtype)
        if hasattr(place, "_elem"):
            place._elem = array
        elif tuple(place.shape) == array.shape:
            place.copy_(tensor(array))
        else:
            raise RuntimeError(
                f"out= is a slice of {list(place.shape)}, and the result is {list(array.shape)}"
            )
    return _with_names(out, found)


def _uncastable(found: torch.dtype, wanted: torch.dtype) -> str:
    one, other = (str(dtype).removeprefix("torch.") for dtype in (found, wanted))
    return f"result type {one} can't be cast to the desired output type {other}"


@functools.cache
def without_out(func: Callable[..., Any]) -> Any:
    """The overload that returns what this one writes into `out`; None if there is none."""
    if not isinstance(func, torch._ops.OpOverload):
        return None
    # By the types of the other arguments: names of overloads follow no rule.
    taken = [str(a.type) for a in func._schema.arguments if not a.is_out]
    packet = func.overloadpacket
    for name in packet.overloads():
        one = getattr(packet, name)
        arguments = one._schema.arguments
        if not any(a.is_out for a in arguments) and [str(a.type) for a in arguments] == taken:
            return one
    return None


# -- promotion of what goes in --------------------------------------------------------------------


_NARROW = (torch.float16, torch.bfloat16)


def widened(args: Tree, kwargs: Tree, to: Callable[..., Any]) -> tuple[Any, Any]:
    """The arguments with 16-bit tensors in 32 bits."""

    def cast(value: object) -> Any:
        narrow = isinstance(value, torch.Tensor) and value.dtype in _NARROW
        return to(value, torch.float32) if narrow else value

    return rebuild((args, kwargs), cast)


def as_floats(
    func: Callable[..., Any], args: Tree, kwargs: Tree, to: Callable[..., Any]
) -> tuple[Any, Any]:
    """The arguments of a function of each entry, such as a sine, as floats where they are whole numbers
    or booleans and the result is not."""
    if not is_pointwise(func):
        return args, kwargs
    tensors = [leaf for _, leaf in flatten((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    if not tensors or any(t.is_floating_point() or t.is_complex() for t in tensors):
        return args, kwargs
    wanted = expected(func, args, kwargs)
    if not isinstance(wanted, torch.Tensor) or not wanted.is_floating_point():
        return args, kwargs
    dtype = wanted.dtype
    return rebuild((args, kwargs), lambda v: to(v, dtype) if isinstance(v, torch.Tensor) else v)


def promoted(
    func: Callable[..., Any], args: Tree, kwargs: Tree, to: Callable[..., Any]
) -> tuple[Any, Any] | None:
    """The arguments in dtypes that JAX's functions take; None if they are in them already.

    Integers and booleans become what PyTorch's result is, 16-bit numbers get 32 bits.
    """
    wanted = expected(func, args, kwargs)
    made = [leaf.dtype for _, leaf in flatten(wanted) if isinstance(leaf, torch.Tensor)]
    if not made:
        return None
    floating = any(dtype.is_floating_point or dtype.is_complex for dtype in made)
    found = []

    def cast(value: object) -> Any:
        if not isinstance(value, torch.Tensor) or value.is_complex():
            return value
        # Not the dtype of the result: JAX's functions want 32 bits, and `corrected` casts what they
        # return.
        dtype = torch.float32 if floating or value.is_floating_point() else torch.int32
        if value.dtype == dtype:
            return value
        found.append(value)
        return to(value, dtype)

    inner = rebuild((args, kwargs), cast)
    return inner if found else None

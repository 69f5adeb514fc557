"""The environment in which a forward pass is traced: torchax's, with additional lowerings.

They are below PyTorch's functions, at the level of ATen operations, so that they also apply inside
functions that PyTorch composes (`F.normalize` calls a norm, and so on).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch
import torch.nn.functional as functional

from tailrace.base.array_like import DTypeLike, TensorLike
from tailrace.base.trees import Tree
from tailrace.torch.calls.arrays import dtype_on_device
from tailrace.torch.torchax import results
from tailrace.torch.torchax.broadcasts import SPREAD, spread, spread_out
from tailrace.torch.torchax.common_dtypes import in_common_dtype, refuse_as_pytorch
from tailrace.torch.torchax.copies import deep_copied, reduced
from tailrace.torch.torchax.env import Env
from tailrace.torch.torchax.indexed_writes import set_item
from tailrace.torch.torchax.ops import attention, elementwise, norms, random_numbers
from tailrace.torch.torchax.ops.compositions import (
    COMPOSITIONS,
    WRAPPED,
    index_reduce,
    polygamma_in_place,
    scatter_reduce_of,
)
from tailrace.torch.torchax.ops.matrices import MATRICES
from tailrace.torch.torchax.ops.pools import DILATED, POOLS
from tailrace.torch.torchax.ops.resizing import RESIZING
from tailrace.torch.torchax.ops.special_functions import COMPOSED, SPECIAL
from tailrace.torch.torchax.ops.tensors import MAKERS, tensor_from
from tailrace.torch.torchax.refused_dtypes import refuse_mixed
from tailrace.torch.torchax.unnamed_device import unnamed_device
from tailrace.torch.tracing.autocast import cast_arguments
from tailrace.torch.tracing.watch import current_watch

aten = torch.ops.aten


def _safe_softmax(x: TensorLike, dim: int, dtype: torch.dtype | None = None) -> Any:
    """A softmax that is 0 for rows of -inf, which would give NaN."""
    x = x if dtype is None else x.astype(dtype_on_device(dtype))
    nothing = jnp.isneginf(x).all(dim, keepdims=True)
    # The row is replaced before the softmax too: both sides of a `where` are differentiated, and that
    # of -inf is NaN.
    return jnp.where(nothing, 0, jax.nn.softmax(jnp.where(nothing, 0, x), dim))


def _first_of(
    choose: Callable[..., Any], x: TensorLike, dim: int, keepdim: bool = False
) -> tuple[Any, Any]:
    """The maximum, or minimum, and its index; the first of several gets the gradient, as in PyTorch."""
    if not x.ndim:
        return x, jnp.zeros((), int)
    index = choose(x, dim, keepdims=True)
    # JAX's own maximum shares the gradient among equal entries.
    # A comparison and not a gather, whose gradient would be a scatter.
    hit = jax.lax.broadcasted_iota(index.dtype, x.shape, dim % x.ndim) == index
    value = jnp.where(hit, x, jnp.zeros((), x.dtype)).sum(dim, keepdims=keepdim, dtype=x.dtype)
    return value, index if keepdim else index.squeeze(dim)


ELEMENTWISE: dict[Any, Callable[..., Any]] = {
    aten.abs: elementwise.absolute,
    aten.atan2: elementwise.angle,
    aten.celu: elementwise.celu,
    aten.clamp: elementwise.clamp,
    aten.clamp_max: elementwise.clamp_max,
    aten.clamp_min: elementwise.clamp,
    aten.elu: elementwise.elu,
    aten.fmod: elementwise.fmod,
    aten.hardsigmoid: elementwise.hardsigmoid,
    aten.hardswish: elementwise.hardswish,
    aten.hardtanh: elementwise.hardtanh,
    aten.i0: elementwise.bessel_i0,
    aten.leaky_relu: elementwise.leaky_relu,
    aten.logit: elementwise.logit,
    aten.mish: elementwise.mish,
    aten.remainder: elementwise.remainder,
    aten.selu: elementwise.selu,
    aten.softplus: elementwise.softplus,
    aten.xlogy: elementwise.entropy,
}
"""Lowerings by operation, for all its overloads; in-place forms are derived."""

OTHERS: dict[Any, Callable[..., Any]] = {
    # PyTorch's compositions write `flips & 1`; torchax's is of truth values.
    aten.__and__: jnp.bitwise_and,
    aten.__or__: jnp.bitwise_or,
    aten.__xor__: jnp.bitwise_xor,
    aten._cdist_forward.default: norms.each_with_each,
    aten._pdist_forward.default: norms.each_pair,
    aten._safe_softmax.default: _safe_softmax,
    aten.cdist.default: norms.each_with_each,
    aten.dist.default: norms.apart,
    aten.linalg_vector_norm.default: norms.vector_norm,
    aten.log_sigmoid_forward.default: elementwise.log_sigmoid,
    aten.max.dim: functools.partial(_first_of, jnp.argmax),
    aten.mean: norms.mean,
    aten.min.dim: functools.partial(_first_of, jnp.argmin),
    aten.sinc.default: jnp.sinc,
    aten.special_log_ndtr.default: jax.scipy.special.log_ndtr,
    aten.std.correction: norms.deviation,
    aten.std.default: norms.deviation_of_all,
    aten.std.dim: norms.deviation_along,
    aten.std_mean.correction: norms.deviation_and_mean,
    aten.std_mean.default: norms.deviation_and_mean_of_all,
    aten.std_mean.dim: norms.deviation_and_mean_along,
    torch.cdist: norms.each_with_each,
}

LOWERED = {
    **ELEMENTWISE,
    **OTHERS,
    **COMPOSITIONS,
    **MATRICES,
    **POOLS,
    **RESIZING,
    **SPECIAL,
}
"""All lowerings that take and return arrays."""

OF_TENSORS: dict[Any, Callable[..., Any]] = {
    aten.index_reduce: index_reduce,
    **COMPOSED,
}
"""Those that take and return tensors."""

DRAWN: dict[Any, Callable[..., Any]] = {
    aten.bernoulli_: random_numbers.chance,
    aten.cauchy_: random_numbers.cauchy,
    aten.exponential_: random_numbers.exponential,
    aten.geometric_: random_numbers.geometric,
    aten.log_normal_: random_numbers.log_normal,
    aten.normal_: random_numbers.normal,
    aten.random_: random_numbers.integers,
}
"""Operations that fill a tensor with random numbers."""


RESHAPING = (
    *(aten.squeeze_, aten.swapaxes_, aten.swapdims_, aten.t_, aten.transpose_, aten.unsqueeze_),
)
"""Operations that reshape a tensor in place."""

_WIDENED = (
    "adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d avg_pool1d avg_pool2d avg_pool3d "
    "_adaptive_avg_pool2d _adaptive_avg_pool3d cumprod cumsum digamma erfinv lgamma logcumsumexp "
    "logsumexp mvlgamma native_group_norm native_layer_norm polygamma prod sinc std std_mean var "
    "var_mean _log_softmax _softmax addcdiv addcmul addr lerp logit xlogy nanmean fmod remainder i0 "
    "logaddexp logaddexp2 hypot renorm _trilinear grid_sampler_2d grid_sampler_3d"
)

WIDENED = frozenset(
    {
        *(getattr(aten, name) for name in _WIDENED.split()),
        *(getattr(aten, name) for name in dir(aten) if name.startswith("special_")),
        functional.interpolate,
    }
)
"""Operations that PyTorch computes in 32 bits for 16-bit tensors."""


def make_environment() -> Any:
    """An environment of torchax with these lowerings; torchax's environment is unchanged."""
    from torchax.ops import op_base, ops_registry
    from torchax.tensor import Environment, OperatorNotFound, Tensor
    from torchax.view import View

    # Methods that no mode intercepts: one casts its tensor in place, one loses the base of a view.
    for name in {"flatten", "type_as"} & set(vars(Tensor)):
        delattr(Tensor, name)
    kinds: tuple[Any, ...] = (Tensor, View)
    for kind in kinds:
        kind.__setitem__ = set_item
        kind.__deepcopy__ = deep_copied
        kind.__reduce_ex__ = reduced
        kind.detach = _detached(kind.detach)
        kind.data = property(lambda self: self.detach(), _with_data)

    decompositions: Any = torch._decomp.decomposition_table  # type: ignore[attr-defined]

    # torchax asks an operator how it wants its arguments: as arrays, as tensors, with the environment.
    def lowered(func: Callable[..., Any], run: Callable[..., Any], **flags: bool) -> Any:
        kinds = dict(is_jax_function=True, is_user_defined=True, needs_env=False, is_view_op=False)
        return ops_registry.Operator(func, run, **{**kinds, **flags})

    def mutating(func: Callable[..., Any], run: Callable[..., Any], **flags: bool) -> Any:
        return lowered(func, run, is_jax_function=False, is_view_op=True, **flags)

    class Lowerings(Environment):
        """torchax's environment with more lowerings."""

        def load_ops(self) -> None:
            super().load_ops()
            # Theirs is for bicubic with two sizes alone; all that PyTorch composes it of is lowered.
            self._ops.pop(functional.interpolate, None)
            # A copy: some lowerings of ours wrap torchax's, which are replaced in the table below.
            theirs = dict(self._ops)
            for func, run in LOWERED.items():
                for one in _with_overloads(func):
                    self._ops[one] = lowered(one, run)
            for func in ELEMENTWISE:
                for one in _with_overloads(getattr(aten, f"{func.__name__}_", None)):
                    self._ops[one] = mutating(one, op_base.InplaceOp(func))
            for func, draw in DRAWN.items():
                for one in _with_overloads(func):
                    self._ops[one] = mutating(one, random_numbers.in_place(draw), needs_env=True)
            for func in RESHAPING:
                for one in _with_overloads(func):
                    if (plain := _out_of_place(one)) is not None:
                        self._ops[one] = mutating(one, op_base.InplaceOp(plain, True))
            in_place = aten.polygamma_.default
            self._ops[in_place] = mutating(in_place, polygamma_in_place)
            for one in _with_overloads(aten.copy_):
                self._ops[one] = mutating(one, _copied, needs_env=True)
            for func in (aten.fill_, aten.zero_):
                for one in _with_overloads(func):
                    self._ops[one] = mutating(one, _filled, needs_env=True)
            for one in _with_overloads(aten.normal):
                self._ops[one] = lowered(one, random_numbers.normal_of, needs_env=True)
            for func, run in OF_TENSORS.items():
                for one in _with_overloads(func):
                    self._ops[one] = lowered(one, run, is_jax_function=False)
            for one in (aten.rrelu_with_noise.default, aten.rrelu_with_noise):
                self._ops[one] = lowered(one, random_numbers.rrelu, needs_env=True)
            for make in MAKERS:
                run = tensor_from(make)
                self._ops[make] = lowered(make, run, is_jax_function=False, needs_env=True)
            functional_normal = aten.normal_functional.default
            self._ops[functional_normal] = lowered(
                functional_normal, random_numbers.normal_like, needs_env=True
            )
            for func, change in {
                **WRAPPED,
                **SPREAD,
                **DILATED,
                aten.pow: elementwise.power_of,
            }.items():
                for one in [f for f in _with_overloads(func) if f in theirs]:
                    self._ops[one] = lowered(one, change(theirs[one].func))
            reduce = scatter_reduce_of(theirs[aten.scatter_reduce].func)
            for one in _with_overloads(aten.scatter_reduce):
                self._ops[one] = lowered(one, reduce)
            # At the level of operations: `nn.Conv2d` and the transposed ones all end here.
            convolve = theirs[aten.convolution].func
            self._ops[aten.convolution] = lowered(aten.convolution, _grouped(convolve))
            for one in (
                functional.scaled_dot_product_attention,
                aten.scaled_dot_product_attention,
            ):
                self._ops[one] = lowered(one, attention.attend, needs_env=True)

        def dispatch(
            self,
            func: Callable[..., Any],
            types: Sequence[type],
            args: Tree,
            kwargs: Mapping[str, Any],
        ) -> Any:
            """Run a function or operation, by PyTorch's rules for `dtype=`, `out=` and results."""
            kwargs = kwargs or {}
            # Dtypes are known without values, and JAX's rules of promotion are not PyTorch's.
            if results.asks_of_dtypes(func):
                return results.expected(func, args, kwargs)
            if kwargs.get("device") is not None and results.has_traced(args):
                # Code that says `device="cuda"` or "cpu" means where its other tensors are; here
                # all are in the program.
                kwargs = {**kwargs, "device": unnamed_device()}
            out = kwargs.get("out")
            if out is not None and results.is_written_here(out):
                # Lowerings need not know `out=`: the function runs without, and the result is
                # written afterwards.
                rest = {name: value for name, value in kwargs.items() if name != "out"}
                found = self._without_out(func, types, args, rest)
                return results.written(out, found, self.j2t_iso)
            args, kwargs = cast_arguments(func, args, kwargs)
            if (plain := _out_of_place(func)) is not None:
                results.check_cast(plain, args, kwargs)
            refuse_as_pytorch(func, args, kwargs)
            refuse_mixed(func, args, kwargs)
            args, kwargs = results.with_numbers_stored(func, args, kwargs)
            first, rest = results.cast_first(func, args, kwargs, self._as_dtype)
            # In this order: `dtype=` decides what is computed in, then integers get a common dtype or
            # become floats, then 16 bits become 32; only then are shapes known for broadcasting.
            first, rest = in_common_dtype(func, first, rest, self._as_dtype)
            first, rest = results.as_floats(func, first, rest, self._as_dtype)
            if getattr(func, "overloadpacket", func) in WIDENED:
                first, rest = results.widened(first, rest, self._as_dtype)
            first, rest = spread_out(func, first, rest, self.j2t_iso)
            try:
                found = super().dispatch(func, types, first, rest)
            except TypeError as error:
                if isinstance(error, jax.errors.JAXTypeError):
                    raise  # an error about values, not dtypes
                # With the arguments as they were given: promotion decides on their dtypes.
                found = self._promoted(func, types, args, kwargs, error)
            return results.corrected(func, args, kwargs, found, self.j2t_iso)

        def _without_out(
            self,
            func: Callable[..., Any],
            types: Sequence[type],
            args: Sequence[Any],
            kwargs: Mapping[str, Any],
        ) -> Any:
            plain = results.without_out(func) or func
            try:
                return self.dispatch(plain, types, args, kwargs)
            except OperatorNotFound:
                if isinstance(func, torch._ops.OpOverload):
                    raise
                return func(*args, **kwargs)

        def _as_dtype(self, x: TensorLike, dtype: torch.dtype) -> Any:
            return self.j2t_iso(results.as_dtype(x.jax(), dtype_on_device(dtype)))

        def _to_copy(self, the_tensor: TensorLike, new_dtype: DTypeLike, new_device: object) -> Any:
            """Cast a tensor; devices in PyTorch's code are ignored."""
            if not hasattr(the_tensor, "jax"):
                return super()._to_copy(the_tensor, new_dtype, new_device)
            if new_dtype is None or dtype_on_device(new_dtype) == the_tensor.jax().dtype:
                return the_tensor
            return self._as_dtype(the_tensor, new_dtype)

        def _promoted(
            self,
            func: Callable[..., Any],
            types: Sequence[type],
            args: Tree,
            kwargs: Tree,
            error: TypeError,
        ) -> Any:
            """Retry with integers promoted to PyTorch's result dtype; JAX's functions are stricter."""
            inner = results.promoted(func, args, kwargs, self._as_dtype)
            if inner is None:
                raise error
            return super().dispatch(func, types, *inner)

        def _get_op_or_decomp(self, func: torch._ops.OpOverload) -> Any:
            known = func in self._ops or getattr(func, "overloadpacket", None) in self._ops
            # PyTorch's compositions may write through views, which are not tracked here.
            if not known and (plain := _out_of_place(func)) is not None:
                return mutating(func, op_base.InplaceOp(plain, _reshapes(func)))
            try:
                return super()._get_op_or_decomp(func)
            except OperatorNotFound:
                if _is_composed(func):
                    return lowered(func, _composed(func, func.decompose), is_jax_function=False)
                if func in decompositions:
                    run = _composed(func, decompositions[func])
                    return lowered(func, run, is_jax_function=False)
                raise

    return Lowerings()


def _is_composed(func: Callable[..., Any]) -> bool:
    """Whether PyTorch composes an operation of others."""
    if not isinstance(func, torch._ops.OpOverload):
        return False
    kernel = "CompositeImplicitAutograd"
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), kernel)


def _composed(func: Callable[..., Any], run: Callable[..., Any]) -> Callable[..., Any]:
    """PyTorch's composition of an operation; some have parts without a lowering."""

    def composed(*args: Any, **kwargs: Any) -> Any:
        try:
            return run(*args, **kwargs)
        except AssertionError as error:
            if "torchax" not in str(error):
                raise
            # torchax asserts that an operation has a lowering; its text would name a part of the
            # composition, not the function that the user called.
            raise NotImplementedError(f"{results.name_of(func)} has no lowering") from error

    return composed


def _detached(detach: Callable[..., Any]) -> Callable[..., Any]:
    """`detach`, which modes do not intercept, as a tensor that shares its values."""

    def run(self: TensorLike) -> Any:
        watch = current_watch()
        return detach(self) if watch is None else watch.aliases.detached(self)

    return run


def _with_data(self: TensorLike, value: TensorLike) -> None:
    """`x.data = value`: other values, of which the gradient knows nothing."""
    if not hasattr(self, "_elem"):
        raise NotImplementedError("setting .data of a slice (use copy_)")
    if self.shape == value.shape and self.dtype == value.dtype:
        self.detach().copy_(value)
    else:
        watch = current_watch()
        self._elem = (value if watch is None else watch.constant(value)).jax()


def _copied(x: TensorLike, source: TensorLike, non_blocking: bool = False, *, env: Env) -> Any:
    """Copy one tensor into another, keeping its shape and dtype, which torchax's does not."""
    held = x.jax()
    if not hasattr(source, "jax"):
        number = isinstance(source, bool | int | float | complex)
        source = env.j2t_iso(jnp.asarray(source)) if number else env.to_xla(source)
    new = jnp.broadcast_to(results.as_dtype(source.jax(), held.dtype), held.shape)
    if hasattr(x, "_elem"):
        x._elem = new
    else:
        x.update(env.j2t_iso(new))
    return x


def _filled(x: TensorLike, value: TensorLike = 0, *, env: Env) -> Any:
    """Fill a tensor, or a slice of one, for which torchax's has no effect."""
    held = x.jax()
    if hasattr(value, "jax"):
        if value.dim():
            raise RuntimeError(
                f"fill_ only supports 0-dimension value tensor but got tensor with {value.dim()} "
                f"dimensions."
            )
        value = results.as_dtype(value.jax(), held.dtype)
    return x.copy_(env.j2t_iso(jnp.full(held.shape, value, held.dtype)))


def _out_of_place(func: Callable[..., Any]) -> Any:
    """The out-of-place form of an in-place operation; None if there is none."""
    if not isinstance(func, torch._ops.OpOverload) or not results.is_in_place(func):
        return None
    # By PyTorch's convention for names; the schemas are compared below.
    packet = getattr(aten, func.overloadpacket.__name__[:-1], None)
    if packet is None:
        return None
    # Mostly of the same name; a few differ only in their parameters.
    taken = _kinds_taken(func)
    named = [func._overloadname] if func._overloadname in packet.overloads() else []
    plain = [getattr(packet, name) for name in (*named, *packet.overloads())]
    return next((one for one in plain if _kinds_taken(one) == taken), None)


def _reshapes(func: torch._ops.OpOverload) -> bool:
    return func.overloadpacket in RESHAPING


def _kinds_taken(func: torch._ops.OpOverload) -> list[str]:
    return [str(argument.type) for argument in func._schema.arguments]


def _with_overloads(func: Callable[..., Any] | None) -> list[Any]:
    """An operation and its overloads, except those with `out`."""
    if not isinstance(func, torch._ops.OpOverloadPacket):
        return [] if func is None else [func]
    names = [name for name in func.overloads() if not name.endswith("out")]
    return [func, *(getattr(func, name) for name in names)]


def _grouped(convolve: Callable[..., Any]) -> Callable[..., Any]:
    """A convolution whose transposed form is also correct for groups of several channels.

    Its bias is added here, by the rule of `broadcasts`.
    """

    def run(x: TensorLike, weight: TensorLike, bias: TensorLike, *given: Any) -> Any:
        transposed, groups = given[3], given[5]
        if transposed and groups > 1:
            # torchax reads the first two dimensions as [channels of a group, all outputs].
            parts = weight.reshape(groups, -1, *weight.shape[1:])
            weight = jnp.swapaxes(parts, 0, 1).reshape(weight.shape)
        out = convolve(x, weight, None, *given)
        if bias is None:
            return out
        return out + spread(bias.reshape(-1, *(1,) * (weight.ndim - 2)), out.shape)

    return run

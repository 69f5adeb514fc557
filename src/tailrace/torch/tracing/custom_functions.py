"""`torch.autograd.Function`: a forward pass with a custom backward pass.

    y = Reverse.apply(x)        ──▶   y = attach([x], [forward(x)], what backward needs)
                                       attach: the identity, whose gradient is Reverse.backward

forward runs without gradients, as in PyTorch; then backward is traced, once, on values like the
gradients that it will get. Whatever it takes from ctx, or from around it, is found by that and handed
over. JAX would differentiate forward otherwise, and the backward of the class would never run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch
from torch.autograd import function as autograd
from torch.utils import checkpoint

from tailrace.base.array_like import TensorLike
from tailrace.base.trees import Tree
from tailrace.errors import ProgramError
from tailrace.jaxprs.internals import ClosedJaxpr
from tailrace.jaxprs.stretches import bound, results_of, run
from tailrace.torch.calls.containers import rebuild
from tailrace.torch.errors import UsageError
from tailrace.torch.tracing.watch import Watch, current_watch, is_traced

# The class in between: `Function.apply` ends in its `apply`, also where it was taken off its class
# long ago (`reverse = Reverse.apply` at the top of a file).
_BASE: Any = autograd._SingleLevelFunction


class _Context(autograd.FunctionCtx):
    """What forward and backward of a function share."""

    def __init__(self, needed: tuple[bool, ...]) -> None:
        self.needs_input_grad = needed
        self.to_save: tuple[Any, ...] = ()
        self.non_differentiable: tuple[Any, ...] = ()
        self.materialize_grads = True

    @property
    def saved_tensors(self) -> tuple[Any, ...]:
        """What `save_for_backward` was given."""
        return self.to_save

    def again(self, watch: Watch) -> _Context:
        """A copy with separate tensors, so that in-place changes by backward stay inside."""
        same = object.__new__(type(self))
        for name, value in vars(self).items():
            fresh = rebuild(value, lambda v: watch.tensor(v.jax()) if is_traced(v) else v)
            object.__setattr__(same, name, fresh)
        return same


@contextlib.contextmanager
def custom_functions(
    watch: Watch, trains: bool, mode: Callable[[], contextlib.AbstractContextManager[Any]]
) -> Iterator[None]:
    """While this lasts, `apply` of a function on traced tensors keeps the function's own backward.

    Args:
        watch: the forward pass that is traced.
        trains: whether it will be differentiated; backward is not looked at otherwise.
        mode: makes a mode like that of the forward pass, with separate constants.
    """
    before = vars(_BASE).get("apply")

    def apply(cls: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
        traced = current_watch() is watch and any(map(is_traced, args)) and not kwargs
        # Its backward runs PyTorch's autograd, which has recorded nothing here.
        if cls is checkpoint.CheckpointFunction and current_watch() is watch:
            # What to keep and what to compute again is decided elsewhere.
            function, _, *inputs = args
            return function(*inputs)
        if not traced or cls.__module__ == checkpoint.__name__:
            plain = before.__get__(None, cls) if before else super(_BASE, cls).apply
            return plain(*args, **kwargs)
        return _Call(watch, cls, args, trains and torch.is_grad_enabled(), mode).run()

    _BASE.apply = classmethod(apply)
    try:
        yield
    finally:
        if before is None:
            del _BASE.apply
        else:
            _BASE.apply = before


class _Call:
    """One `apply`."""

    def __init__(
        self,
        watch: Watch,
        cls: type[torch.autograd.Function],
        args: tuple[Any, ...],
        differentiated: bool,
        mode: Callable[[], contextlib.AbstractContextManager[Any]],
    ) -> None:
        self.watch, self.cls, self.args, self.mode = watch, cls, args, mode
        needed = tuple(differentiated and _has_gradient(a) for a in args)
        self.context = _Context(needed)
        # As in PyTorch, gradients of other arguments are dropped, whatever backward returns for them.
        self.wanted = [number for number, flag in enumerate(needed) if flag]

    def run(self) -> Any:
        """What `apply` returns."""
        watch = self.watch
        # JAX must not find a way through forward: the gradient is that of backward alone.
        stopped = [jax.lax.stop_gradient(a.jax()) if is_traced(a) else a for a in self.args]
        pairs = zip(self.args, stopped, strict=True)
        given: list[Any] = [watch.tensor(v) if is_traced(a) else a for a, v in pairs]
        # Losses inside forward are not those of the model: they are taken off the list again below.
        losses = len(watch.losses)
        with torch.no_grad():
            out = self._forward(given)
        inner, watch.losses[losses:] = watch.losses[losses:], []
        results = list(out) if isinstance(out, tuple) else [out]
        made = list(results)
        for number, value in self._attached(results).items():
            # The values of forward, with the gradient of backward.
            made[number] = watch.tensor(value)
        for original, copied, value in zip(self.args, given, stopped, strict=True):
            # `ctx.mark_dirty` need not be called for this to be noticed.
            if is_traced(original) and copied.jax() is not value:  # changed in place
                place = next((n for n, r in enumerate(results) if r is copied), None)
                original.copy_(copied if place is None else made[place])
                if place is not None:
                    made[place] = original
        if inner and is_traced(made[0]):
            watch.mark_loss(made[0])  # a loss around a loss: the inner one has no gradient
        watch.latest = next((value for value in made if is_traced(value)), watch.latest)
        return tuple(made) if isinstance(out, tuple) else made[0]

    def _forward(self, given: list[Any]) -> Any:
        cls = self.cls
        # The older of PyTorch's two forms: one method, `forward(ctx, ...)`.
        if cls.setup_context is autograd._SingleLevelFunction.setup_context:
            return cls.forward(self.context, *given)
        out = cls.forward(*given)
        cls.setup_context(self.context, tuple(given), out)
        return out

    def _attached(self, results: Sequence[Any]) -> dict[int, Any]:
        """The results that have a gradient, which is what backward makes of it; by their number."""
        constant = self.context.non_differentiable
        flowing = [
            number
            for number, value in enumerate(results)
            if _has_gradient(value) and not any(value is one for one in constant)
        ]
        if not self.wanted or not flowing:
            return {}
        values = [jax.lax.stop_gradient(results[number].jax()) for number in flowing]
        program, positions = self._backward(results, flowing, values)
        inputs = [self.args[number].jax() for number in self.wanted]
        # What backward uses from around it, as arguments of `attach`: JAX refuses custom rules that
        # close over values which are differentiated.
        held = [jax.lax.stop_gradient(value) for value in program.consts]

        @jax.custom_vjp
        def attach(inputs: Tree, values: Tree, held: TensorLike) -> Any:
            return values

        def keep(inputs: Tree, values: Tree, held: TensorLike) -> Any:
            return values, held

        def back(held: TensorLike, gradients: Tree) -> Any:
            jaxpr = program.jaxpr
            known = bound(jaxpr, held, gradients)
            run(jaxpr.eqns, known)
            found = results_of(known, jaxpr.outvars)
            by_number = dict(zip(positions, found, strict=True))
            return [by_number.get(number) for number in self.wanted], None, None

        attach.defvjp(keep, back)
        return dict(zip(flowing, attach(inputs, values, held), strict=True))

    def _backward(
        self, results: Sequence[Any], flowing: list[int], values: list[Any]
    ) -> tuple[ClosedJaxpr, list[int]]:
        """backward as a program of the gradients, and the arguments that it gives gradients of."""
        watch, positions = self.watch, []
        # Drawn outside of the trace of backward, which would otherwise leave its own tracer behind
        # as the key.
        key = watch.env.get_and_rotate_prng_key()
        zeros = [
            watch.tensor(jnp.zeros_like(value.jax())) if is_traced(value) else None
            for value in results
        ]

        def program(gradients: list[Any]) -> list[Any]:
            given = list(zeros)
            for number, gradient in zip(flowing, gradients, strict=True):
                given[number] = watch.tensor(gradient.conj())  # PyTorch's of complex is conjugate
            with watch.env.override_property(prng=key), self.mode(), torch.no_grad():
                found = _backward_of(self.cls)(self.context.again(watch), *given)
            fitted = self._fitted(found if isinstance(found, tuple | list) else (found,))
            positions[:] = fitted
            return list(fitted.values())

        before = watch.losses[:], watch.latest
        try:
            return jax.make_jaxpr(program)(values), positions
        finally:
            # Losses that backward computes are not losses of the model.
            watch.losses[:], watch.latest = before

    def _fitted(self, found: Sequence[Any]) -> dict[int, Any]:
        """The gradients that backward returned, as arguments of these shapes and dtypes have them."""
        name, fitted = f"{self.cls.__name__}.backward", {}
        if len(found) < len(self.args) or any(g is not None for g in found[len(self.args) :]):
            raise UsageError(
                f"backward of a torch.autograd.Function returns one gradient for each argument of "
                f"forward. {name} returns {len(found)}, and forward takes {len(self.args)}."
            )
        for number in self.wanted:
            if found[number] is None:
                continue
            gradient = self._value(found[number])
            argument = self.args[number].jax()
            lead = gradient.ndim - argument.ndim
            shape = (1,) * lead + argument.shape
            if lead < 0 or any(a not in (b, 1) for a, b in zip(shape, gradient.shape, strict=True)):
                raise UsageError(
                    f"A gradient has the shape of its argument. {name} returns one of "
                    f"{list(gradient.shape)} for argument {number}, which is {list(argument.shape)}."
                )
            axes = tuple(n for n, size in enumerate(gradient.shape) if shape[n] != size)
            # As PyTorch does: a gradient of a broadcast result is summed to the shape of the
            # argument.
            gradient = gradient.sum(axes, keepdims=True).reshape(argument.shape)
            fitted[number] = gradient.conj().astype(argument.dtype)
        return fitted

    def _value(self, gradient: TensorLike) -> Any:
        return gradient.jax() if is_traced(gradient) else self.watch.env.t2j_copy(gradient.detach())


def _has_gradient(value: TensorLike) -> bool:
    return is_traced(value) and (value.dtype.is_floating_point or value.dtype.is_complex)


def _backward_of(cls: type[autograd.Function]) -> Callable[..., Any]:
    base = torch.autograd.Function
    for name in ("vjp", "backward"):
        if getattr(cls, name) is not getattr(base, name):
            return getattr(cls, name)
    raise ProgramError(
        f"A torch.autograd.Function that trains defines backward. {cls.__name__} does not"
        + (", and its jvp is not used here." if cls.jvp is not base.jvp else ".")
        + " Define backward(ctx, *gradients), or call the function under torch.no_grad()."
    )

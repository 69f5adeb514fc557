"""What an `optimizer_function` of a pipeline returns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from tailrace.base.array_like import TensorLike
from tailrace.compat.arguments import OptimizerLike, VariableLike
from tailrace.compat.ipu.errors import IPURuntimeError, IPUTypeError, IPUValueError
from tailrace.compat.ipu.graph.update import as_optimizer, is_keras_optimizer


class OptimizerFunctionOutput:
    """What the `optimizer_function` of a pipeline returns.

    Args:
        opt: an optax transformation, a Keras optimizer, or one with the interface of the original.
        loss: the loss of the mini-batch.
        compute_gradients_args: the arguments of `compute_gradients`: the list of variables.
        compute_gradients_kwargs: the same by name: `var_list`.
        apply_gradients_args: further arguments of `apply_gradients`.
        apply_gradients_kwargs: the same by name.
        variables: what a Keras optimizer trains.
        tape: a `GradientTape` that says what a Keras optimizer trains.
        gradient_capture_context: refused: watch gradients with taps (`cotangent/...`).
        captured_gradient_outfeed: refused, likewise.

    Raises:
        IPUTypeError: the loss is not a tensor, or an argument has the wrong type.
        IPUValueError: arguments do not go with the optimizer, or gradients are to be captured, which a
            pipeline does not do.
        IPURuntimeError: a Keras optimizer has neither variables nor a tape.

    >>> import optax
    >>> from tailrace.compat import ipu
    >>> output = ipu.pipelining_ops.OptimizerFunctionOutput(optax.sgd(0.1), loss=2.0)
    >>> float(output.loss)
    2.0
    """

    def __init__(
        self,
        opt: OptimizerLike,
        loss: TensorLike,
        compute_gradients_args: tuple[Any, ...] | None = None,
        compute_gradients_kwargs: dict[str, Any] | None = None,
        apply_gradients_args: tuple[Any, ...] | None = None,
        apply_gradients_kwargs: dict[str, Any] | None = None,
        variables: Sequence[VariableLike] | None = None,
        tape: Any = None,
        gradient_capture_context: object = None,
        captured_gradient_outfeed: object = None,
    ) -> None:
        # Wrapped at once, so that what is no optimizer is refused in the user's own function.
        self.opt = as_optimizer(opt)
        try:
            self.loss = jnp.asarray(loss)
        except TypeError:
            raise IPUTypeError(
                f"OptimizerFunctionOutput.loss must be a tensor. Received: {type(loss).__name__}."
            ) from None
        self.compute_gradients_args = _checked(
            compute_gradients_args, tuple, "compute_gradients_args"
        )
        self.compute_gradients_kwargs = _checked(
            compute_gradients_kwargs, dict, "compute_gradients_kwargs"
        )
        self.apply_gradients_args = _checked(apply_gradients_args, tuple, "apply_gradients_args")
        self.apply_gradients_kwargs = _checked(
            apply_gradients_kwargs, dict, "apply_gradients_kwargs"
        )
        self.variables, self.tape = variables, tape
        self.gradient_capture_context = self.captured_gradient_outfeed = None
        # The original's classes of Keras optimizers have no `compute_gradients`, and so other
        # arguments.
        self._check(is_keras_optimizer(opt))
        if gradient_capture_context is not None or captured_gradient_outfeed is not None:
            raise IPUValueError(
                "OptimizerFunctionOutput.gradient_capture_context and captured_gradient_outfeed are "
                "not available: watch gradients of activations with taps (`cotangent/...`)."
            )

    def _check(self, keras: bool) -> None:
        given = bool(self.compute_gradients_args or self.compute_gradients_kwargs)
        if keras and given:
            raise IPUValueError(
                "OptimizerFunctionOutput.compute_gradients_args and compute_gradients_kwargs may not "
                "be used with OptimizerV2 instances. Use variables=."
            )
        if not keras and self.variables is not None:
            raise IPUValueError(
                "OptimizerFunctionOutput.variables may only be used with OptimizerV2."
            )
        if self.tape is not None:
            if not hasattr(self.tape, "watched"):  # both have it: `ipu.GradientTape`, and `tf`'s
                raise IPUTypeError("OptimizerFunctionOutput.tape must be a GradientTape.")
            if not keras:
                raise IPUValueError(
                    "OptimizerFunctionOutput.tape may only be used with OptimizerV2."
                )
            if self.variables:
                raise IPUValueError(
                    "OptimizerFunctionOutput.tape may not be used when "
                    "OptimizerFunctionOutput.variables is nonempty."
                )
        if keras and self.tape is None and self.variables is None:
            raise IPURuntimeError(
                "No variables to optimize. Provide OptimizerFunctionOutput.variables or a tape."
            )

    def trained(self, seen: Sequence[Any]) -> list[Any]:
        """The variables to train, of those that the stages have touched (called by pipelines).

        Args:
            seen: the variables that the stages have touched.

        Raises:
            IPUValueError: there are none.
        """
        wanted = self.variables
        # What the tape watched, else what is named, else all that the stages touched.
        if self.tape is not None:
            wanted = self.tape.watched or None
        elif wanted is None:
            # The first positional argument of `compute_gradients` after the loss is `var_list`.
            wanted = self.compute_gradients_kwargs.get(
                "var_list", (*self.compute_gradients_args, None)[0]
            )
        if wanted is None:
            wanted = [var for var in seen if getattr(var, "trainable", False)]
        wanted = list(wanted)
        if not wanted:
            raise IPUValueError("No variables to optimize.")
        return wanted


def _checked(value: object, kind: type, name: str) -> Any:
    if value is not None and not isinstance(value, kind):
        raise IPUTypeError(
            f"OptimizerFunctionOutput.{name} must be a {kind.__name__}. "
            f"Received: {type(value).__name__}."
        )
    return kind() if value is None else value

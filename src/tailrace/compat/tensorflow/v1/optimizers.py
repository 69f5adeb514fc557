"""Optimizers of TensorFlow 1: `tf.train.GradientDescentOptimizer` and others.

Their rules are those of TensorFlow 1, written as optax transformations where those are the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from tailrace.base.array_like import TensorLike
from tailrace.base.trees import Tree
from tailrace.compat.ipu.graph.deferred import Feed, evaluated, running
from tailrace.compat.ipu.graph.state import is_variable, value_of
from tailrace.compat.ipu.graph.update import OptaxOptimizer
from tailrace.compat.ipu.graph.update import Optimizer as PlainOptimizer


class Optimizer(PlainOptimizer):
    """The class that optimizers of a program derive from; a subclass defines `apply_gradients`.

    Args:
        use_locking: without effect.
        name: its name.

    >>> from tailrace.compat.tensorflow.compat import v1 as tf
    >>> class Descent(tf.train.Optimizer):
    ...     def apply_gradients(self, grads_and_vars, global_step=None, name=None):
    ...         for grad, var in grads_and_vars:
    ...             var.assign_sub(0.25 * grad)
    >>> Descent(name="descent").get_name()
    'descent'
    """

    def __init__(self, use_locking: bool = False, name: str | None = None) -> None:
        del use_locking
        super().__init__(name)


class _Rule(OptaxOptimizer, Optimizer):
    """An optimizer whose rule is a transformation, made with the rate that a program has at the time.

    Args:
        make: makes the transformation of a rate.
        rate: a number, a value of the program, or a variable, which is read at each update.
        name: its name.
    """

    def __init__(self, make: Callable[[Any], Any], rate: TensorLike, name: str) -> None:
        self._make, self._rate = make, rate
        # No state depends on the rate, and a rate that the program is fed has no value outside of it.
        OptaxOptimizer.__init__(self, None, name, lambda values: make(0.0).init(values))

    @property
    def transformation(self) -> Any:  # type: ignore[override]
        """The rule with the current rate."""
        rate = evaluated(self._rate, running() or Feed())
        # A schedule of TensorFlow 2 is a function (`decays`).
        rate = rate() if callable(rate) and not is_variable(rate) else rate
        return self._make(value_of(rate) if is_variable(rate) else rate)

    @transformation.setter
    def transformation(self, value: TensorLike) -> None:
        del value  # made when it is asked for


class GradientDescentOptimizer(_Rule):
    """Plain descent.

    Args:
        learning_rate: a number, a value of the program, or a variable, which is read at each update.
        use_locking: without effect.
        name: its name.

    >>> from tailrace.compat import ipu
    >>> from tailrace.compat.tensorflow.compat import v1 as tf
    >>> w = ipu.Variable(2.0, name="w")
    >>> optimizer = tf.train.GradientDescentOptimizer(0.25)
    >>> ipu.ipu_compiler.compile(lambda: optimizer.minimize(w * w))()
    >>> w.numpy().item()
    1.0
    """

    def __init__(
        self, learning_rate: TensorLike, use_locking: bool = False, name: str = "GradientDescent"
    ) -> None:
        del use_locking
        super().__init__(optax.sgd, learning_rate, name)


class MomentumOptimizer(_Rule):
    """Descent along a running sum of gradients.

    Args:
        learning_rate: a number, a value of the program, or a variable, which is read at each update.
        momentum: how much of the sum is kept.
        use_locking: without effect.
        name: its name.
        use_nesterov: whether to look ahead along the sum.

    >>> from tailrace.compat.tensorflow.compat import v1 as tf
    >>> optimizer = tf.train.MomentumOptimizer(0.1, momentum=0.9)
    """

    def __init__(
        self,
        learning_rate: TensorLike,
        momentum: TensorLike,
        use_locking: bool = False,
        name: str = "Momentum",
        use_nesterov: bool = False,
    ) -> None:
        del use_locking
        super().__init__(lambda rate: optax.sgd(rate, momentum, use_nesterov), learning_rate, name)


class RMSPropOptimizer(_Rule):
    """Gradients divided by their running norm.

    Args:
        learning_rate: a number, a value of the program, or a variable, which is read at each update.
        decay: how much of the mean square is kept.
        momentum: how much of the sum of updates is kept.
        epsilon: added to the mean square.
        use_locking: without effect.
        centered: whether the mean is subtracted.
        name: its name.

    >>> from tailrace.compat.tensorflow.compat import v1 as tf
    >>> optimizer = tf.train.RMSPropOptimizer(0.1)
    """

    def __init__(
        self,
        learning_rate: TensorLike,
        decay: TensorLike = 0.9,
        momentum: TensorLike = 0.0,
        epsilon: TensorLike = 1e-10,
        use_locking: bool = False,
        centered: bool = False,
        name: str = "RMSProp",
    ) -> None:
        del use_locking
        # Without momentum optax keeps no sum, as TensorFlow's would stay unused.
        options = {"centered": centered, "momentum": momentum or None}
        super().__init__(
            # 1.0: TensorFlow's mean square begins at 1, and epsilon is under the root.
            lambda rate: optax.rmsprop(rate, decay, epsilon, 1.0, **options),
            learning_rate,
            name,
        )


class AdagradOptimizer(_Rule):
    """Gradients divided by the norm of all previous ones.

    Args:
        learning_rate: a number, a value of the program, or a variable, which is read at each update.
        initial_accumulator_value: what the sum of squares starts with.
        use_locking: without effect.
        name: its name.

    >>> from tailrace.compat.tensorflow.compat import v1 as tf
    >>> optimizer = tf.train.AdagradOptimizer(0.1)
    """

    def __init__(
        self,
        learning_rate: TensorLike,
        initial_accumulator_value: TensorLike = 0.1,
        use_locking: bool = False,
        name: str = "Adagrad",
    ) -> None:
        del use_locking
        start = initial_accumulator_value
        # No epsilon, as in TensorFlow 1: the sum of squares begins above 0 instead.
        super().__init__(lambda rate: optax.adagrad(rate, start, eps=0.0), learning_rate, name)


class AdamOptimizer(_Rule):
    """Adam; as in TensorFlow 1, epsilon is added before the bias is corrected.

    Args:
        learning_rate: a number, a value of the program, or a variable, which is read at each update.
        beta1: how much of the mean is kept.
        beta2: how much of the mean square is kept.
        epsilon: added to the root of the mean square.
        use_locking: without effect.
        name: its name.

    >>> from tailrace.compat import ipu
    >>> from tailrace.compat.tensorflow.compat import v1 as tf
    >>> w = ipu.Variable(2.0, name="w")
    >>> optimizer = tf.train.AdamOptimizer(0.5)
    >>> ipu.ipu_compiler.compile(lambda: optimizer.minimize(w * w))()
    >>> round(w.numpy().item(), 3)
    1.5
    """

    def __init__(
        self,
        learning_rate: TensorLike = 0.001,
        beta1: TensorLike = 0.9,
        beta2: TensorLike = 0.999,
        epsilon: TensorLike = 1e-8,
        use_locking: bool = False,
        name: str = "Adam",
    ) -> None:
        del use_locking
        super().__init__(lambda rate: _adam(rate, beta1, beta2, epsilon), learning_rate, name)


def _adam(rate: TensorLike, beta1: TensorLike, beta2: TensorLike, epsilon: TensorLike) -> Any:
    def init(params: Tree) -> Any:
        zeros = jax.tree.map(jnp.zeros_like, params)
        return jnp.zeros((), jnp.int32), zeros, zeros

    def update(updates: Tree, state: Tree, params: Tree = None) -> Any:
        del params
        grads = updates
        count, first, second = state
        count = count + 1
        first = jax.tree.map(lambda m, g: beta1 * m + (1 - beta1) * g, first, grads)
        second = jax.tree.map(lambda v, g: beta2 * v + (1 - beta2) * g * g, second, grads)
        time = count.astype(jnp.float32)
        # Both corrections are in the rate, so epsilon is added to an uncorrected root. `optax.adam`
        # corrects first, with slightly different steps.
        scale = rate * jnp.sqrt(1 - beta2**time) / (1 - beta1**time)
        after = jax.tree.map(lambda m, v: -scale * m / (jnp.sqrt(v) + epsilon), first, second)
        return after, (count, first, second)

    return optax.GradientTransformation(init, update)

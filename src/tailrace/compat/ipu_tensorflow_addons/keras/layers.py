"""Layers of the originals, by their names and arguments, as layers of Keras.

What the chip fused is computed as Keras computes it. Arguments about the chip are accepted and noted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

import tailrace as tr
import tailrace.keras as _tk  # noqa: F401  (selects the backend before Keras is imported)
from tailrace.base.array_like import DTypeLike, ShapeLike, TensorLike
from tailrace.base.messages import note_once
from tailrace.base.trees import Tree
from tailrace.compat.arguments import InitializerLike, SeedLike
from tailrace.compat.originals.missing import missing_from
from tailrace.errors import OptionError

_CHIP = (
    "available_memory_proportion_fwd",
    "available_memory_proportion_bwd",
    "options",
    "options_bwd",
    "partials_dtype",
    "serialization_factor",
    "serialization_dimension",
    "input_serialization_factor",
    "unpadded_hidden_size",
)


def _without_chip(name: str, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments that Keras knows; the others are about the chip and noted."""
    for option in _CHIP:
        # Removed in any case: Keras refuses arguments that it does not know.
        if kwargs.pop(option, None) is not None:
            note_once(f"{name}({option}=...) is about the original chip and changes nothing here.")
    return kwargs


class Embedding(keras.layers.Embedding):
    """`keras.layers.Embedding`; `serialization_factor` is accepted and noted.

    Args:
        input_dim: how many rows the table has.
        output_dim: the size of a row.
        *args: as in Keras.
        **kwargs: as in Keras, and options of the chip, which are noted.

    >>> import numpy as np
    >>> from tailrace.compat.ipu_tensorflow_addons.keras import layers
    >>> layers.Embedding(10, 4, serialization_factor=2)(np.array([1, 2])).shape
    (2, 4)
    """

    def __init__(self, input_dim: int, output_dim: int, *args: Any, **kwargs: Any) -> None:
        super().__init__(input_dim, output_dim, *args, **_without_chip("Embedding", kwargs))


class _InOrder:
    """What the recurrent layers share: sequences may have time as dim 0."""

    def call(
        self,
        sequences: TensorLike,
        initial_state: Tree = None,
        mask: TensorLike = None,
        training: bool = False,
    ) -> Any:
        """The outputs, and the state if asked for."""
        plain: Any = super().call  # pyright: ignore[reportAttributeAccessIssue]
        return _in_order(
            self,
            sequences,
            lambda rows: plain(rows, initial_state=initial_state, mask=mask, training=training),
        )


class LSTM(_InOrder, keras.layers.LSTM):
    """`keras.layers.LSTM`; also named `PopnnLSTM`.

    Args:
        units: the size of the state.
        *args: as in Keras.
        dropout_seed: the seed of dropout; None: Keras' own.
        **kwargs: as in Keras, `time_major=True` for sequences with time as the first dimension, and
            options of the chip, which are noted.

    >>> import numpy as np
    >>> from tailrace.compat.ipu_tensorflow_addons.keras import layers
    >>> layers.LSTM(4, time_major=True)(np.zeros((5, 2, 3), np.float32)).shape
    (2, 4)
    """

    def __init__(
        self, units: int, *args: Any, dropout_seed: SeedLike = None, **kwargs: Any
    ) -> None:
        kwargs.setdefault("seed", _seed(dropout_seed))
        time_major = _is_time_major(kwargs)
        super().__init__(units, *args, **_without_chip("LSTM", kwargs))
        self.time_major = time_major


class GRU(_InOrder, keras.layers.GRU):
    """`keras.layers.GRU`, with the original's `reset_after=False`; also named `PopnnGRU`.

    Args:
        units: the size of the state.
        *args: as in Keras.
        dropout_seed: the seed of dropout; None: Keras' own.
        **kwargs: as in Keras, `time_major=True` for sequences with time as the first dimension, and
            options of the chip, which are noted.

    >>> import numpy as np
    >>> from tailrace.compat.ipu_tensorflow_addons.keras import layers
    >>> layers.GRU(4)(np.zeros((2, 5, 3), np.float32)).shape
    (2, 4)
    """

    def __init__(
        self, units: int, *args: Any, dropout_seed: SeedLike = None, **kwargs: Any
    ) -> None:
        kwargs.setdefault("seed", _seed(dropout_seed))
        kwargs.setdefault("reset_after", False)  # the original's default, and Keras 1's
        time_major = _is_time_major(kwargs)
        super().__init__(units, *args, **_without_chip("GRU", kwargs))
        self.time_major = time_major


PopnnLSTM, PopnnGRU = LSTM, GRU


def _seed(seed: SeedLike) -> Any:
    # The original's seeds are pairs of numbers, Keras' are single ones.
    return None if seed is None else int(sum(seed)) if isinstance(seed, list | tuple) else int(seed)


def _is_time_major(kwargs: dict[str, Any]) -> bool:
    return bool(kwargs.pop("time_major", False))


def _in_order(layer: Any, sequences: TensorLike, run: Callable[..., Any]) -> Any:
    """Rows before steps, as Keras has it, where the original was given steps before rows."""
    if not layer.time_major:
        return run(sequences)
    # Keras has dropped `time_major`; the states have no axis of time.
    found = run(keras.ops.swapaxes(sequences, 0, 1))
    # Without an axis of time, there is nothing to swap back.
    if not layer.return_sequences:
        return found
    outputs, *states = found if isinstance(found, list | tuple) else [found]
    outputs = keras.ops.swapaxes(outputs, 0, 1)
    return [outputs, *states] if states else outputs


class Dropout(keras.layers.Dropout):
    """`keras.layers.Dropout`.

    Args:
        rate: the share that is set to 0.
        noise_shape: as in Keras.
        seed: a number, or two of them.
        ref: refused: it dropped the same elements each time.
        **kwargs: as for any layer.

    Raises:
        OptionError: `ref` is set.

    >>> import numpy as np
    >>> from tailrace.compat.ipu_tensorflow_addons.keras import layers
    >>> layers.Dropout(0.5)(np.ones(3, np.float32), training=False).tolist()
    [1.0, 1.0, 1.0]
    """

    def __init__(
        self,
        rate: float = 0.5,
        noise_shape: ShapeLike = None,
        seed: SeedLike = None,
        ref: bool = False,
        **kwargs: Any,
    ) -> None:
        if ref:
            raise OptionError(
                "Dropout(ref=True) reused a mask of the chip. Draw the mask once, with "
                "keras.random.dropout(ones, rate, seed=seed), and multiply by it."
            )
        super().__init__(rate, noise_shape, _seed(seed), **kwargs)


class GroupNormalization(keras.layers.GroupNormalization):
    """`keras.layers.GroupNormalization`, with the original's arguments; also named `GroupNorm`.

    Args:
        dtype: the dtype of the parameters.
        groups: how many groups of channels.
        channels_axis: which axis has the channels.
        center: whether an offset is added.
        scale: whether there is a factor.
        epsilon: added to the variance.
        beta_initializer: the initializer of the offset.
        gamma_initializer: the initializer of the factor.
        strided_channel_grouping: how the chip grouped channels; noted. Neighbours form a group here.
        trainable: whether offset and factor are trained.
        name: the layer's name.
        **kwargs: as for any layer.

    >>> import numpy as np
    >>> from tailrace.compat.ipu_tensorflow_addons.keras import layers
    >>> layers.GroupNormalization(groups=2)(np.ones((2, 4), np.float32)).shape
    (2, 4)
    """

    def __init__(
        self,
        dtype: DTypeLike = "float32",
        groups: int = 2,
        channels_axis: int = -1,
        center: bool = True,
        scale: bool = True,
        epsilon: float = 1e-3,
        beta_initializer: InitializerLike = None,
        gamma_initializer: InitializerLike = None,
        strided_channel_grouping: bool = True,
        trainable: bool = True,
        name: str | None = None,
        **kwargs: Any,
    ) -> None:
        if groups > 1 and strided_channel_grouping:
            note_once(
                "GroupNormalization groups neighbouring channels, as Keras does; with "
                "strided_channel_grouping the original took every n-th."
            )
        super().__init__(
            groups,
            channels_axis,
            epsilon,
            center,
            scale,
            beta_initializer or "zeros",
            gamma_initializer or "ones",
            dtype=dtype,
            name=name,
            trainable=trainable,
            **kwargs,
        )


class InstanceNormalization(GroupNormalization):
    """Normalises each channel of each example by itself; also named `InstanceNorm`.

    Args:
        **kwargs: those of `GroupNormalization`, without `groups`.

    >>> import numpy as np
    >>> from tailrace.compat.ipu_tensorflow_addons.keras import layers
    >>> layers.InstanceNormalization()(np.ones((2, 3, 4), np.float32)).shape
    (2, 3, 4)
    """

    def __init__(self, **kwargs: Any) -> None:
        kwargs.pop("groups", None)
        # Keras' -1: as many groups as channels.
        super().__init__(groups=-1, strided_channel_grouping=False, **kwargs)


class LayerNormalization(keras.layers.LayerNormalization):
    """`keras.layers.LayerNormalization`; also named `LayerNorm`.

    >>> import numpy as np
    >>> from tailrace.compat.ipu_tensorflow_addons.keras import layers
    >>> layers.LayerNormalization()(np.ones((2, 4), np.float32)).shape
    (2, 4)
    """


GroupNorm, InstanceNorm, LayerNorm = GroupNormalization, InstanceNormalization, LayerNormalization


class RecomputationCheckpoint(keras.layers.Layer):
    """Keeps its inputs where a pipeline recomputes activations, and passes them on.

    Arguments are those of any Keras layer.

    >>> import numpy as np
    >>> from tailrace.compat.ipu_tensorflow_addons.keras import layers
    >>> layers.RecomputationCheckpoint()(np.ones(2, np.float32)).tolist()
    [1.0, 1.0]
    """

    def call(self, inputs: Tree, **kwargs: Any) -> Any:
        """The inputs.

        Args:
            inputs: tensors.
            **kwargs: without effect.
        """
        del kwargs
        return tr.recomputation_checkpoint(inputs)

    def compute_output_spec(self, inputs: Tree, **kwargs: Any) -> Any:
        """The form of the inputs.

        Args:
            inputs: tensors.
            **kwargs: without effect.
        """
        del kwargs
        return keras.tree.map_structure(lambda one: keras.KerasTensor(one.shape, one.dtype), inputs)


class SerialDense(keras.layers.Dense):
    """`keras.layers.Dense`; the original cut the product into pieces to save the chip's memory.

    Args:
        units: the size of the output.
        *args: as in Keras.
        **kwargs: as in Keras, and `serialization_factor`, `serialization_dimension`, which are noted.

    >>> import numpy as np
    >>> from tailrace.compat.ipu_tensorflow_addons.keras import layers
    >>> layers.SerialDense(3, serialization_factor=2)(np.ones((2, 4), np.float32)).shape
    (2, 3)
    """

    def __init__(self, units: int, *args: Any, **kwargs: Any) -> None:
        super().__init__(units, *args, **_without_chip("SerialDense", kwargs))


class EffectiveTransformer(keras.layers.Layer):
    """Refused: it packed sequences for the chip. Use `keras.layers.MultiHeadAttention`.

    Args:
        *args: without effect.
        **kwargs: without effect.

    Raises:
        OptionError: always.

    >>> from tailrace.compat.ipu_tensorflow_addons.keras import layers
    >>> layers.EffectiveTransformer()  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    tailrace.errors.OptionError: ... Use keras.layers.MultiHeadAttention.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise OptionError(
            "EffectiveTransformer packed sequences for the chip. Use keras.layers.MultiHeadAttention."
        )


__getattr__, __dir__ = missing_from(__name__)

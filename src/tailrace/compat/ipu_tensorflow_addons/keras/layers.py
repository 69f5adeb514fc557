"""Layers of the originals, by their names and arguments, as layers of Keras.

What the chip fused is computed as Keras computes it. Arguments about the chip are accepted and noted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

import tailrace as tr
import tailrace.keras as _tk  # noqa: F401  (sees to the backend before Keras is imported)
from tailrace.compat.arguments import SeedLike
from tailrace.compat.originals.missing import missing_from
from tailrace.data.array_like import DTypeLike, ShapeLike, TensorLike
from tailrace.data.trees import Tree
from tailrace.errors import OptionError
from tailrace.messages import note_once

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
        if kwargs.pop(option, None) is not None:
            note_once(f"{name}({option}=...) is about the original chip and changes nothing here.")
    return kwargs


class Embedding(keras.layers.Embedding):
    """`keras.layers.Embedding`; `serialization_factor` is accepted."""

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
    """`keras.layers.LSTM`.

    Args:
        units: the size of the state.
        dropout_seed: the seed of dropout; None: Keras' own.
        **kwargs: as in Keras, and options of the chip.
    """

    def __init__(
        self, units: int, *args: Any, dropout_seed: SeedLike = None, **kwargs: Any
    ) -> None:
        kwargs.setdefault("seed", _seed(dropout_seed))
        time_major = _is_time_major(kwargs)
        super().__init__(units, *args, **_without_chip("LSTM", kwargs))
        self.time_major = time_major


class GRU(_InOrder, keras.layers.GRU):
    """`keras.layers.GRU`; see `LSTM`."""

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
    return None if seed is None else int(sum(seed)) if isinstance(seed, list | tuple) else int(seed)


def _is_time_major(kwargs: dict[str, Any]) -> bool:
    return bool(kwargs.pop("time_major", False))


def _in_order(layer: Any, sequences: TensorLike, run: Callable[..., Any]) -> Any:
    """Rows before steps, as Keras has it, where the original was given steps before rows."""
    if not layer.time_major:
        return run(sequences)
    found = run(keras.ops.swapaxes(sequences, 0, 1))
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
        ref: whether the same elements are dropped each time; refused.
        **kwargs: as for any layer.

    Raises:
        OptionError: `ref` is set.
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
    """`keras.layers.GroupNormalization`, with the names that the original gave its arguments.

    Args:
        dtype: of the parameters.
        groups: how many groups of channels.
        channels_axis: which axis has the channels.
        center: whether an offset is added.
        scale: whether there is a factor.
        epsilon: added to the variance.
        beta_initializer: of the offset.
        gamma_initializer: of the factor.
        strided_channel_grouping: how the chip grouped channels; noted.
        trainable: whether offset and factor are trained.
        name: the layer's name.
        **kwargs: as for any layer.
    """

    def __init__(
        self,
        dtype: DTypeLike = "float32",
        groups: int = 2,
        channels_axis: int = -1,
        center: bool = True,
        scale: bool = True,
        epsilon: float = 1e-3,
        beta_initializer: Any = None,
        gamma_initializer: Any = None,
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
    """Each channel of each example by itself."""

    def __init__(self, **kwargs: Any) -> None:
        kwargs.pop("groups", None)
        super().__init__(groups=-1, strided_channel_grouping=False, **kwargs)


class LayerNormalization(keras.layers.LayerNormalization):
    """`keras.layers.LayerNormalization`."""


GroupNorm, InstanceNorm, LayerNorm = GroupNormalization, InstanceNormalization, LayerNormalization


class RecomputationCheckpoint(keras.layers.Layer):
    """Keeps its inputs where a pipeline computes activations again, and passes them on."""

    def call(self, inputs: Tree, **kwargs: Any) -> Any:
        """The inputs."""
        del kwargs
        return tr.recomputation_checkpoint(inputs)

    def compute_output_spec(self, inputs: Tree, **kwargs: Any) -> Any:
        """The form of the inputs."""
        del kwargs
        return keras.tree.map_structure(lambda one: keras.KerasTensor(one.shape, one.dtype), inputs)


class SerialDense(keras.layers.Dense):
    """`keras.layers.Dense`; the original cut the product into pieces to save the chip's memory.

    Args:
        units: the size of the output.
        **kwargs: as in Keras, and `serialization_factor`, `serialization_dimension`, which are noted.
    """

    def __init__(self, units: int, *args: Any, **kwargs: Any) -> None:
        super().__init__(units, *args, **_without_chip("SerialDense", kwargs))


class EffectiveTransformer(keras.layers.Layer):
    """Refused."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise OptionError(
            "EffectiveTransformer packed sequences for the chip. Use keras.layers.MultiHeadAttention."
        )


__getattr__, __dir__ = missing_from(__name__)

"""`tr.verify`: does a pipeline compute what its model computes without one?"""

from __future__ import annotations

import dataclasses
import functools
import html
from collections.abc import Sequence
from typing import Any, overload

import jax
import numpy as np

from tailrace.base.trees import Tree
from tailrace.errors import OptionError
from tailrace.jaxprs.marks import path_name
from tailrace.pipeline.pipeline import Pipeline
from tailrace.program.step.update_rule import Optimizer
from tailrace.records.html_table import html_table
from tailrace.taps.tap import Tap
from tailrace.trainer.modules.recognition import bind
from tailrace.trainer.trainer import Trainer

MOST_ROWS = 20
"""Tensors that are printed."""


@dataclasses.dataclass(frozen=True)
class Difference:
    """How far one tensor of the pipelined step is from that of the plain one.

    Attributes:
        name: the tensor.
        absolute: the largest difference of any of its values.
        relative: `absolute` divided by the largest value of the plain tensor.
    """

    name: str
    absolute: float
    relative: float


class Verification(Sequence[Difference]):
    """All differences, the largest first; prints those that are not zero."""

    def __init__(self, differences: Sequence[Difference]) -> None:
        # What is not a number comes first: it is as different as can be.
        self._differences = sorted(
            differences, key=lambda d: -np.nan_to_num(d.relative, nan=np.inf)
        )

    @property
    def worst(self) -> float:
        """The largest relative difference of any tensor."""
        return self._differences[0].relative

    def within(self, tolerance: float = 1e-6) -> bool:
        """Whether no tensor differs by more than this, relative to its largest value."""
        return bool(self.worst <= tolerance)

    @overload
    def __getitem__(self, index: int) -> Difference: ...
    @overload
    def __getitem__(self, index: slice) -> list[Difference]: ...
    def __getitem__(self, index: int | slice) -> Difference | list[Difference]:
        return self._differences[index]

    def __len__(self) -> int:
        return len(self._differences)

    def __repr__(self) -> str:
        head, *rows = self._rows()
        width = max(len(name) for name, _, _ in [head, *rows])
        lines = [f"{name:<{width}}  {a:>10}  {r:>10}" for name, a, r in [head, *rows]]
        return "\n".join([*(lines if rows else []), self._sentence()])

    def _repr_html_(self) -> str:
        head, *rows = self._rows()
        return (html_table(head, rows) if rows else "") + html.escape(self._sentence())

    def _rows(self) -> list[tuple[str, str, str]]:
        """What differs, the largest first."""
        found = self._differing[:MOST_ROWS]
        text = [(row.name, f"{row.absolute:.3g}", f"{row.relative:.3g}") for row in found]
        return [("tensor", "absolute", "relative"), *text]

    @property
    def _differing(self) -> list[Difference]:
        return [row for row in self._differences if row.absolute != 0]

    def _sentence(self) -> str:
        differing, every = len(self._differing), len(self)
        if not differing:
            return f"all {every} tensors are equal to the last bit"
        more = f"; the {MOST_ROWS} largest are listed" if differing > MOST_ROWS else ""
        return f"{differing} of {every} tensors differ, by at most {self.worst:.3g}{more}"


def verify(
    pipeline: Pipeline,
    params: Tree,
    batch: Tree,
    *,
    optimizer: Optimizer | None = None,
    model_state: Tree = None,
    replicas: int = 1,
    seed: int = 0,
) -> Verification:
    """Run one step with the pipeline and one without, and compare every tensor of the update.

    Args:
        pipeline: the pipeline.
        params: its parameters.
        batch: an element of the dataset, used for all microbatches; or a list with an element for
            each microbatch of each replica.
        optimizer: an optax transformation; SGD if it is None.
        model_state: the model state to start from.
        replicas: the number of replicas.
        seed: the seed of random keys.

    Raises:
        OptionError: it is not a pipeline.

    Example:
        >>> import jax.numpy as jnp, numpy as np, tailrace as tr
        >>> stages = [lambda w, x: jnp.tanh(x * w), lambda w, h: (h * w).sum()]
        >>> pipeline = tr.Pipeline(stages, accumulation=4, device_mapping=[0, 0])
        >>> tr.verify(pipeline, [np.float32(1), np.float32(2)], np.ones(3, np.float32)).within(1e-6)
        True
    """
    if not isinstance(pipeline, Pipeline):
        raise OptionError(f"verify compares a tr.Pipeline. Received: {pipeline!r}.")
    import optax

    bound, pipeline = bind(pipeline, params, model_state)
    params, model_state = bound.params, bound.model_state
    count = pipeline.accumulation.microbatches * replicas
    # A batch may itself be a list: only one of exactly this length is taken for elements.
    elements = batch if isinstance(batch, list) and len(batch) == count else [batch] * count

    def whole(*args: Any) -> Any:
        *first, element = args
        state = first[1] if model_state is not None else None
        return pipeline(first[0], state, model_state is not None, element, pipeline.inputs)

    # A pipeline decides itself how an element becomes arguments of its first stage.
    whole.takes_whole_element = True  # type: ignore[attr-defined]
    trainer = functools.partial(
        Trainer,
        optimizer=optimizer or optax.sgd(0.01),
        model_state=model_state,
        replicas=replicas,
        seed=seed,
        observe=[Tap("accumulated/*", reduce="tensor"), Tap("updated/*", reduce="tensor")],
    )
    # The plain step has shared weights once, so that their gradients are summed by JAX: the oracle of
    # the sum that the pipeline does itself.
    untied = pipeline.untie(params)
    plain = _one_step(trainer(whole, params=untied, accumulation=pipeline.accumulation), elements)
    piped = _one_step(trainer(pipeline, params=params), elements)
    return Verification([_difference(name, plain[name], piped[name]) for name in plain])


def _one_step(trainer: Trainer, elements: list[Any]) -> dict[str, np.ndarray]:
    """Every tensor of an update, after one step."""
    trainer.fit(elements, steps=1, progress=False)
    tensors = {name: np.asarray(trainer.records[name].values) for name, _ in trainer.records}
    tensors["loss"] = np.asarray(trainer.history.loss)
    for path, leaf in jax.tree_util.tree_flatten_with_path(trainer.model_state)[0]:
        tensors[f"buffer/{path_name(path)}"] = np.asarray(leaf)
    return tensors


def _difference(name: str, plain: np.ndarray, piped: np.ndarray) -> Difference:
    # In double precision: the difference of two 16-bit values need not be one.
    a, b = plain.astype(np.float64), piped.astype(np.float64)
    absolute = float(np.abs(a - b).max(initial=0.0))
    scale = float(np.abs(a).max(initial=0.0))
    # Relative to the tensor's largest value, not value by value: a value near zero is the
    # difference of large ones, and its own relative error says nothing.
    return Difference(name, absolute, absolute / scale if scale else absolute)

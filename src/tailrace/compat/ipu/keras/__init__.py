"""Keras with the original's names: the same objects as in `tailrace.keras`.

Models made in the scope of an `IPUStrategy` have the setters themselves (`set_pipelining_options` and
similar); this package has what programs import by name.

In: names of the original. Out: classes of `tailrace.keras`, and optimizers with the original's
arguments.
Rule: no behaviour of its own beyond arguments; what a model does is in `tailrace.keras`.
"""

from __future__ import annotations

import tailrace.keras as _tk  # noqa: F401  (selects the backend before Keras is imported)
from tailrace.compat.ipu.keras import layers as layers
from tailrace.compat.ipu.keras import optimizers as optimizers
from tailrace.compat.originals.missing import missing_from

_SAME = (
    "MaybeOutfeed",
    "MaybeOutfeedQueue",
    "Outfeed",
    "OutfeedCallback",
    "OutfeedOptimizer",
    "OutfeedOptimizerMode",
    "PipelineStage",
)

_OTHERS = {
    "FunctionalLayerPipelineStageAssignment": "LayerStageAssignment",
    "FunctionalNestedModelPipelineStageAssignment": "NestedModelStageAssignment",
    "ModelLayerPipelineStageAssignment": "LayerStageAssignment",
    "NestedModelPipelineStageAssignment": "NestedModelStageAssignment",
    "ReplicatedMetricReductionMethod": "MetricReduction",
    "SequentialLayerPipelineStageAssignment": "LayerStageAssignment",
    "SequentialNestedModelPipelineStageAssignment": "NestedModelStageAssignment",
}
"""The name there, and the one in `tailrace.keras`."""

__getattr__, __dir__ = missing_from(
    __name__,
    {name: f"tailrace.keras:{name}" for name in _SAME}
    | {name: f"tailrace.keras:{ours}" for name, ours in _OTHERS.items()},
)

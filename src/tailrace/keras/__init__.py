"""Keras 3 on Tailrace: device loops, replicas, pipelines and sight of every tensor.

>>> import tailrace.keras as tk
"""

from tailrace.keras import backend as _backend

_backend.load()

from tailrace.keras.adoption import adopt as adopt  # noqa: E402
from tailrace.keras.assignments import LayerStageAssignment as LayerStageAssignment  # noqa: E402
from tailrace.keras.assignments import (  # noqa: E402
    NestedModelStageAssignment as NestedModelStageAssignment,
)
from tailrace.keras.device_functions import DatasetIterator as DatasetIterator  # noqa: E402
from tailrace.keras.device_functions import repeat as repeat  # noqa: E402
from tailrace.keras.device_functions import value_and_grad as value_and_grad  # noqa: E402
from tailrace.keras.options import MetricReduction as MetricReduction  # noqa: E402
from tailrace.keras.outfeeds import MaybeOutfeed as MaybeOutfeed  # noqa: E402
from tailrace.keras.outfeeds import MaybeOutfeedQueue as MaybeOutfeedQueue  # noqa: E402
from tailrace.keras.outfeeds import Outfeed as Outfeed  # noqa: E402
from tailrace.keras.outfeeds import OutfeedCallback as OutfeedCallback  # noqa: E402
from tailrace.keras.outfeeds import OutfeedOptimizer as OutfeedOptimizer  # noqa: E402
from tailrace.keras.outfeeds import OutfeedOptimizerMode as OutfeedOptimizerMode  # noqa: E402
from tailrace.keras.stages import PipelineStage as PipelineStage  # noqa: E402
from tailrace.keras.strategy import Strategy as Strategy  # noqa: E402
from tailrace.keras.wrappers import CrossReplicaOptimizer as CrossReplicaOptimizer  # noqa: E402
from tailrace.keras.wrappers import (  # noqa: E402
    GradientAccumulationOptimizer as GradientAccumulationOptimizer,
)
from tailrace.keras.wrappers import MapGradientOptimizer as MapGradientOptimizer  # noqa: E402

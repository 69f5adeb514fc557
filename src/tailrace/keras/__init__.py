"""Keras 3 on Tailrace: device loops, replicas, pipelines and observation of every tensor.

In: Keras models, compiled and fitted as usual. Out: the same results, computed by the engine of
`trainer`.

    adopt, model, strategy   a model becomes one of ours: `tk.adopt`, or a strategy's scope
    programs, data           train, test and predict functions as device programs, and their batches
    optimizers               Keras optimizers as update rules, and wrappers around them
    pipelines, settings      stages of a model; options of pipelines, accumulation and replicas
    custom_loops             hand-written loops on the device
    checkpoints              `fit(checkpoint=...)`
    keras_internals          the only module that uses undocumented parts of Keras
    keras_seams              probes that these parts are there

Rules. Core packages never import this one. Keras is hooked once, at import; a hook acts only on
adopted models and inside a strategy's scope.

>>> import tailrace.keras as tk
"""

from tailrace.keras import backend as _backend

_backend.load()

from tailrace.keras.adopt import adopt as adopt  # noqa: E402
from tailrace.keras.adopt import of as of  # noqa: E402
from tailrace.keras.custom_loops.device_functions import DatasetIterator as DatasetIterator  # noqa: E402
from tailrace.keras.custom_loops.device_functions import repeat as repeat  # noqa: E402
from tailrace.keras.custom_loops.device_functions import value_and_grad as value_and_grad  # noqa: E402
from tailrace.keras.optimizers.wrappers import CrossReplicaOptimizer as CrossReplicaOptimizer  # noqa: E402
from tailrace.keras.optimizers.wrappers import (  # noqa: E402
    GradientAccumulationOptimizer as GradientAccumulationOptimizer,
)
from tailrace.keras.optimizers.wrappers import MapGradientOptimizer as MapGradientOptimizer  # noqa: E402
from tailrace.keras.outfeed_layers import MaybeOutfeed as MaybeOutfeed  # noqa: E402
from tailrace.keras.outfeed_layers import MaybeOutfeedQueue as MaybeOutfeedQueue  # noqa: E402
from tailrace.keras.outfeed_layers import Outfeed as Outfeed  # noqa: E402
from tailrace.keras.outfeed_layers import OutfeedCallback as OutfeedCallback  # noqa: E402
from tailrace.keras.outfeed_layers import OutfeedOptimizer as OutfeedOptimizer  # noqa: E402
from tailrace.keras.outfeed_layers import OutfeedOptimizerMode as OutfeedOptimizerMode  # noqa: E402
from tailrace.keras.pipelines.assignment_classes import LayerStageAssignment as LayerStageAssignment  # noqa: E402
from tailrace.keras.pipelines.assignment_classes import (  # noqa: E402
    NestedModelStageAssignment as NestedModelStageAssignment,
)
from tailrace.keras.pipelines.stage_scope import PipelineStage as PipelineStage  # noqa: E402
from tailrace.keras.settings.options import MetricReduction as MetricReduction  # noqa: E402
from tailrace.keras.strategy import Strategy as Strategy  # noqa: E402

"""`keras.optimizer_v2`: Keras' optimizers, under the name of older versions."""

from __future__ import annotations

import types

import keras

optimizer_v2 = types.SimpleNamespace(OptimizerV2=keras.optimizers.Optimizer)

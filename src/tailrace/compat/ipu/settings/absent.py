"""Names of the original that are not here, each with what to use instead."""

from __future__ import annotations

from typing import NoReturn

from tailrace.compat.ipu.errors import IPUNotImplementedError

_ESTIMATORS = (
    "TensorFlow has removed estimators. Use a Keras model in an IPUStrategy, or tr.Trainer"
)
_REPORTS = "Records and run directories (`run_dir=`) show what a program did"

INSTEAD = {
    "ipu.ipu_estimator": _ESTIMATORS,
    "ipu.ipu_pipeline_estimator": _ESTIMATORS,
    "ipu.ipu_run_config": _ESTIMATORS,
    "ipu.ipu_session_run_hooks": _ESTIMATORS,
    "ipu.autoshard": "Cut the model into the stages of a pipeline",
    "ipu.sharding": "Cut the model into the stages of a pipeline",
    "ipu.ipu_multi_worker_strategy": "Several processes are joined by tr.distributed.initialize()",
    "ipu.horovod": "Several processes are joined by tr.distributed.initialize()",
    "ipu.embedding_ops": "Use keras.layers.Embedding",
    "ipu.serving": "Export the Keras model: model.export(...)",
    "ipu.application_compile_op": "Programs are compiled when they are first called",
    "ipu.ops.summary_ops": _REPORTS,
    "ipu.ops.custom_ops": "Write the operation with jax.numpy, or as a JAX primitive",
    "ipu.ops.rnn_ops": "Use keras.layers.LSTM and its like",
    "ipu.ops.nn_ops": "Use keras.ops",
    "ipu.ops.rand_ops": "Use keras.random or jax.random",
    "ipu.ops.embedding_ops": "Use keras.layers.Embedding",
    "ipu.ops.internal_ops.remote_buffers": "Memory is the compiler's affair here",
    "ipu.optimizers.AutomaticLossScalingOptimizer": "Use ALSOptimizer, which replaced it",
}
"""The full name, and what to do instead."""


def refuse(module: str, name: str) -> NoReturn:
    """What `module.name` leads to, if it is not there."""
    instead = INSTEAD.get(f"{module}.{name}")
    if instead is None:
        raise AttributeError(f"module 'tailrace.compat.{module}' has no attribute {name!r}")
    # Not an AttributeError: Python would replace it by "cannot import name".
    raise IPUNotImplementedError(f"{module}.{name} is not available. {instead}.")

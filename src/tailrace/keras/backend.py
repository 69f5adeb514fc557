"""Keras on its JAX backend: selected if no backend is set yet, and required."""

from __future__ import annotations

import os
import sys

from tailrace.errors import MissingDependency, ProgramError

OLDEST = (3, 12)
"""The oldest supported version of Keras."""


def load() -> None:
    """Import Keras with its JAX backend, or raise an error that says why not."""
    if "keras" not in sys.modules:
        # Keras reads it once, when it is imported. A backend that the user has chosen is left, and
        # refused below.
        os.environ.setdefault("KERAS_BACKEND", "jax")
    try:
        import keras
    except ImportError as error:
        raise MissingDependency.for_feature("tailrace.keras", "keras", "keras") from error
    if keras.backend.backend() != "jax":
        raise ProgramError(
            f"tailrace.keras runs Keras on its JAX backend, because programs for the device are "
            f"written in JAX. Received: Keras with the backend {keras.backend.backend()!r}. Import "
            f"tailrace.keras before keras, or set KERAS_BACKEND=jax."
        )
    found = tuple(int(part) for part in keras.__version__.split(".")[:2])
    if found < OLDEST:
        raise ProgramError(
            f"tailrace.keras needs Keras {OLDEST[0]}.{OLDEST[1]} or newer. Received: Keras "
            f"{keras.__version__}. Install it with: pip install -U 'tailrace[keras]'."
        )
    from tailrace.keras import keras_seams  # late: it imports Keras

    keras_seams.check()

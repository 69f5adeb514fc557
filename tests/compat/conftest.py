"""Every test of the seeds' names leaves the devices as it found them."""

import os

import pytest

from tailrace.compat import ipu
from tailrace.compat.ipu.graph.deferred import describe_everywhere
from tailrace.compat.tensorflow import older_words

os.environ.setdefault("KERAS_BACKEND", "jax")  # read when Keras is imported


@pytest.fixture(autouse=True)
def _no_configuration_outlives_its_test():
    yield
    ipu.config.reset_ipu_configuration()
    describe_everywhere(False)  # `disable_v2_behavior` is for the whole process
    older_words.forget()

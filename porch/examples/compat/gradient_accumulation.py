"""Half-precision weights, gradients accumulated in full precision, in the seeds' words.

The optimizer gets gradients of the accumulators' dtype and casts them to that of the variable; the
class that does it is the seed's own, with `keras.ops.cast` in place of TensorFlow's.
"""

import os

os.environ.setdefault("KERAS_BACKEND", "jax")

import keras
import numpy as np

from tailrace.compat import ipu
from tailrace.compat.ipu import ipu_compiler, loops
from tailrace.compat.ipu.optimizers import GradientAccumulationOptimizerV2


class CastGradientsSGD(keras.optimizers.SGD):
    def apply_gradients(self, grads_and_vars, name=None):
        cast_grads_and_vars = [(keras.ops.cast(g, v.dtype), v) for (g, v) in grads_and_vars]
        return super().apply_gradients(cast_grads_and_vars)


def main():
    cfg = ipu.config.IPUConfig()
    cfg.auto_select_ipus = 1
    cfg.configure_ipu_system()

    found = {}
    for dtype in (None, np.float32):
        weight = keras.Variable(1.0, dtype="float16")
        optimizer = GradientAccumulationOptimizerV2(
            CastGradientsSGD(2.0**-12), num_mini_batches=4096, dtype=dtype
        )

        def body(optimizer=optimizer, weight=weight):
            return optimizer.minimize(weight * 1.0, var_list=[weight])

        # 4096 gradients of 1: in float16 their sum does not get beyond 2048.
        ipu_compiler.compile(lambda body=body: loops.repeat(4096, body))()
        found[dtype] = float(weight.value)
    print(f"accumulated in float16: {found[None]}, in float32: {found[np.float32]}")
    return found


if __name__ == "__main__":
    main()

"""An optimizer that a program writes around one of Keras, which sends gradients of each batch."""

import numpy as np
import pytest

keras = pytest.importorskip("keras")

from oracles import assert_close  # noqa: E402
from tailrace.compat import ipu  # noqa: E402
from tailrace.compat.ipu.ipu_outfeed_queue import IPUOutfeedQueue  # noqa: E402
from tailrace.compat.tensorflow.v1.optimizers import Optimizer  # noqa: E402
from tailrace.errors import OptionError  # noqa: E402

X = np.linspace(-1, 1, 64, dtype=np.float32).reshape(16, 4)


class Sender(Optimizer):
    """As the originals' example writes it: gradients are sent after they are computed."""

    def __init__(self, wrapped, queue, model, factor=None):
        super().__init__(False, "Sender")
        self._wrapped, self._queue, self._model, self._factor = wrapped, queue, model, factor

    def compute_gradients(self, loss, var_list=None, **kwargs):
        weights = self._model.trainable_weights
        grads = self._wrapped.get_gradients(loss, weights)
        self._queue.enqueue({v.name: g for g, v in zip(grads, weights, strict=True)})
        if self._factor is not None:
            grads = [grad * self._factor for grad in grads]
        return list(zip(grads, weights, strict=True))

    def apply_gradients(self, grads_and_vars, global_step=None, name=None):
        return self._wrapped.apply_gradients(grads_and_vars)


def trained(stages, factor=None):
    ipu.config.reset_ipu_configuration()
    cfg = ipu.config.IPUConfig()
    cfg.auto_select_ipus = len(set(stages))
    cfg.configure_ipu_system()
    queue = IPUOutfeedQueue()
    with ipu.ipu_strategy.IPUStrategy().scope():
        model = keras.Sequential(
            [
                keras.Input((4,), batch_size=2),
                keras.layers.Dense(3, "tanh", name="first"),
                keras.layers.Dense(1, name="second"),
            ]
        )
        model.set_weights([np.full(w.shape, 0.3, w.dtype) for w in model.get_weights()])
        if len(set(stages)) > 1:
            model.set_pipeline_stage_assignment(stages)
            model.set_pipelining_options(gradient_accumulation_steps_per_replica=4)
        else:
            model.set_gradient_accumulation_options(gradient_accumulation_steps_per_replica=4)
        sender = Sender(keras.optimizers.SGD(0.1), queue, model, factor)
        model.compile(sender, "mse", steps_per_execution=8)
        model.fit(X, X[:, :1], batch_size=2, shuffle=False, verbose=0)
    return queue.dequeue(), model.get_weights()


def test_gradients_of_each_batch_in_a_pipeline_are_those_without():
    piped, weights = trained([0, 1])
    plain, others = trained([0, 0])
    assert sorted(piped) == sorted(plain)
    assert len(piped) == 4
    for name, values in plain.items():
        assert piped[name].shape == values.shape == (8, *values.shape[1:])
        assert_close(np.asarray(piped[name]), np.asarray(values))
    for one, other in zip(weights, others, strict=True):
        assert_close(one, other)


def test_gradients_of_each_batch_cannot_be_changed_in_a_pipeline():
    with pytest.raises(OptionError, match="Sender cannot change them all at once"):
        trained([0, 1], factor=2.0)

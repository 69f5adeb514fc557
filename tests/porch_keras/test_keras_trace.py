"""The timeline of a Keras fit: what the host does, read back from the file."""

import keras
import pytest
from keras_oracle import SPARSE, classifier, digits_like, twins

import tailrace as tr
from timelines import Timeline, no_overlap


class Heard(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        tr.counter("heard", logs["loss"])


@pytest.fixture(scope="module")
def traced(tmp_path_factory):
    """(timeline, callbacks): two epochs of four executions of three batches, with validation."""
    plain, ours = twins(classifier, **{k: v for k, v in SPARSE.items()})
    x, y = digits_like()
    epochs: list[int] = []
    ended = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: epochs.append(epoch))
    callbacks = [Heard(), ended]
    with tr.trace(tmp_path_factory.mktemp("traced"), operations=0) as timeline:
        ours.fit(x, y, 8, 2, verbose=0, callbacks=callbacks, validation_data=(x, y))
        plain.fit(x, y, 8, 2, verbose=0, callbacks=[Heard()])  # that of plain Keras is not ours
    assert epochs == [0, 1]
    return Timeline(timeline.path), callbacks


def test_the_host_says_what_it_does(traced):
    timeline, _ = traced
    found = {one.name for slices in timeline.slices.values() for one in slices}
    expected = {"dataset wait", "dataset read", "infeed copy", "compilation", "dispatch"}
    assert expected | {"outfeed copy", "callback", "validation"} <= found
    executions = timeline.slices["executions"]
    assert no_overlap(executions)
    assert len([one for one in executions if one.about.get("steps") == 3]) >= 8


def test_each_hook_of_a_callback_is_a_span(traced):
    timeline, _ = traced
    found = [tuple(one.about.values()) for one in timeline.named("callback")]
    assert found.count(("Heard", "on_train_batch_end")) == 8
    assert found.count(("LambdaCallback", "on_epoch_end")) == 2
    assert {hook for _, hook in found} == {"on_train_batch_end", "on_epoch_end"}
    assert len(timeline.values["heard"]) == 8 + 24
    assert len(timeline.named("validation")) == 2


def test_callbacks_are_as_they_were(traced):
    _, (heard, ended) = traced
    assert "on_train_batch_end" not in vars(heard)
    assert vars(ended)["on_epoch_end"].__name__ == "<lambda>"

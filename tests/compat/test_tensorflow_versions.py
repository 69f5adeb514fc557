"""Names that mean other things in TensorFlow 1 and 2, and which of them a program gets."""

from operator import attrgetter

import jax
import numpy as np
import pytest

from oracles import assert_close
from tailrace.errors import OptionError

pytest.importorskip("keras")

import tailrace.compat.tensorflow.compat.v1 as v1
from tailrace.compat import tensorflow as tf
from tailrace.compat.ipu.graph.named_variables import forget_variables
from tailrace.compat.originals.missing import RefusedName
from tailrace.compat.tensorflow import older_words

ONES = np.ones((50, 40), np.float32)


@pytest.fixture(autouse=True)
def _no_variable_outlives_its_test():
    forget_variables()
    yield
    forget_variables()


def kept(found):
    """The share of elements that a dropout has kept."""
    return float((np.asarray(found) != 0).mean())


def test_dropout_follows_the_import():
    assert kept(v1.nn.dropout(ONES, 0.9)) > 0.8
    assert kept(tf.nn.dropout(ONES, 0.9)) < 0.2
    assert kept(tf.compat.v1.nn.dropout(ONES, 0.9)) > 0.8


WORDS = [
    *("placeholder", "Session", "get_variable", "layers", "variance_scaling_initializer"),
    *("train.AdamOptimizer", "train.GradientDescentOptimizer", "train.exponential_decay"),
    *("train.Saver", "train.get_global_step"),
]


@pytest.mark.parametrize("word", WORDS)
def test_a_program_of_tensorflow_1_gets_its_meanings(word):
    attrgetter(word)(tf)
    assert kept(tf.nn.dropout(ONES, 0.9)) > 0.8
    assert kept(tf.nn.dropout(ONES, rate=0.9)) < 0.2
    rows = tf.where(np.array([True, False]), np.ones((2, 2)), np.zeros((2, 2)))
    assert np.asarray(rows).tolist() == [[1, 1], [0, 0]]
    loss = tf.losses.mean_squared_error(np.zeros((4, 2)), np.full((4, 2), 2.0))
    assert np.asarray(loss).tolist() == 4.0
    assert float(np.std(tf.random_normal_initializer(seed=1)((100, 100)))) > 0.9
    assert_close(np.asarray(tf.nn.relu(-ONES)), np.zeros_like(ONES))
    with pytest.raises(RefusedName, match=r"tf.metrics.accuracy kept sums in local variables"):
        tf.metrics.accuracy  # noqa: B018


def test_without_such_a_word_they_are_those_of_tensorflow_2():
    columns = tf.where(np.array([True, False]), np.ones((2, 2)), np.zeros((2, 2)))
    assert np.asarray(columns).tolist() == [[1, 0], [1, 0]]
    loss = tf.losses.mean_squared_error(np.zeros((4, 2)), np.full((4, 2), 2.0))
    assert np.asarray(loss).tolist() == [4.0] * 4
    assert float(np.std(tf.random_normal_initializer(seed=1)((100, 100)))) < 0.06


@pytest.mark.parametrize(
    ("use", "name"),
    [
        (lambda: tf.nn.dropout(ONES, 0.9), "nn.dropout"),
        (lambda: tf.losses, "losses"),
        (lambda: tf.where(True, 1.0, 2.0), "where"),
    ],
)
def test_a_meaning_that_was_used_before_is_refused(use, name):
    use()
    text = rf"tf.Session is a name of TensorFlow 1, and tf.{name} was used before.*compat.v1 as tf"
    with pytest.raises(RefusedName, match=text):
        tf.Session  # noqa: B018
    assert tf.compat.v1.Session is not None
    assert v1.Session is not None


def test_names_of_both_versions_say_nothing():
    tf.nn.relu(ONES)
    tf.reduce_sum(ONES, axis=0)
    tf.nn.dropout(ONES, keep_prob=0.5)
    for name in (
        "Checkpoint",
        "CheckpointManager",
        "ExponentialMovingAverage",
        "latest_checkpoint",
    ):
        assert getattr(tf.train, name) is getattr(v1.train, name)
    assert tf.compat.v1.train.AdamOptimizer is v1.train.AdamOptimizer
    assert kept(tf.nn.dropout(ONES, 0.9)) < 0.2
    older_words.forget()
    assert tf.Session is v1.Session


def test_only_tensorflow_1_has_the_words():
    """Names that TensorFlow 2 has as well must not make a program one of 1, and the others must."""
    real = pytest.importorskip("tensorflow")
    assert not [word for word in older_words.WORDS if hasattr(real, word)]
    both = {name for name in dir(v1.train) if hasattr(real.train, name)}
    assert both == older_words.BOTH_TRAIN
    former = [n for n in dir(tf) if hasattr(real.compat.v1, n) and not hasattr(real, n)]
    assert set(former) <= set(older_words.WORDS)


def test_an_optimizer_after_a_meaning_of_tensorflow_2_is_refused():
    tf.where(True, 1.0, 2.0)
    text = (
        r"tf.train.AdamOptimizer is a name of TensorFlow 1, and tf.where.*tf.compat.v1.train.AdamO"
    )
    with pytest.raises(RefusedName, match=text):
        tf.train.AdamOptimizer  # noqa: B018


@pytest.mark.parametrize(
    ("name", "least", "most", "deviation"),
    [
        ("random_normal", -6.0, 6.0, 1.0),
        ("random_uniform", 0.0, 1.0, 12**-0.5),
        ("truncated_normal", -2.0, 2.0, 0.88),
    ],
)
def test_initializers_of_tensorflow_1_are_wide(name, least, most, deviation):
    for made in (getattr(v1, f"{name}_initializer"), getattr(v1.initializers, name)):
        drawn = np.asarray(made(seed=2)((200, 100)))
        assert least <= drawn.min() < drawn.max() <= most
        assert abs(drawn.std() - deviation) < 0.02
    w = v1.get_variable("w", [200, 100], initializer=getattr(v1, f"{name}_initializer"))
    assert abs(np.asarray(w.value()).std() - deviation) < 0.02


def test_labels_have_a_gradient_in_tensorflow_2_only():
    logits, labels = np.array([[1.0, 2.0]], np.float32), np.array([[0.3, 0.7]], np.float32)

    def of(loss):
        return jax.grad(lambda y: loss(labels=y, logits=logits).sum())(labels)

    assert np.asarray(of(v1.nn.softmax_cross_entropy_with_logits)).tolist() == [[0.0, 0.0]]
    expected = -np.asarray(jax.nn.log_softmax(logits))
    assert_close(np.asarray(of(tf.nn.softmax_cross_entropy_with_logits)), expected)
    assert_close(np.asarray(of(v1.nn.softmax_cross_entropy_with_logits_v2)), expected)
    with pytest.raises(OptionError, match="takes named arguments: labels=..., logits=..."):
        v1.nn.softmax_cross_entropy_with_logits(labels, logits)


def test_arguments_by_name_and_by_place():
    y, x = np.float32(1.0), np.float32(-2.0)
    for one in (tf.atan2, tf.math.atan2, v1.atan2):
        assert_close(np.asarray(one(y=y, x=x)), np.arctan2(y, x))
        assert_close(np.asarray(one(y, x)), np.arctan2(y, x))
    table = np.arange(6.0).reshape(3, 2)
    assert np.asarray(v1.nn.embedding_lookup(table, [2], "div")).tolist() == [[4.0, 5.0]]
    scores = np.array([[0.1, 0.9], [0.8, 0.2]], np.float32)
    for one in (v1.math.in_top_k, v1.nn.in_top_k):
        assert np.asarray(one(scores, np.array([1, 1]), 1)).tolist() == [True, False]


def test_layers_of_tensorflow_1_refuse_what_they_would_ignore():
    images = np.ones((2, 4, 4, 3), np.float32)
    for layer in (v1.layers.max_pooling2d, v1.layers.average_pooling2d):
        with pytest.raises(OptionError, match="channels come last.*channels_first"):
            layer(images, 2, 2, data_format="channels_first")
    with pytest.raises(OptionError, match="channels come last.*channels_first"):
        v1.layers.flatten(images, data_format="channels_first")
    columns = v1.layers.dropout(ONES, 0.5, noise_shape=[1, 40], training=True)
    assert len(np.unique(np.asarray(columns), axis=0)) == 1
    assert 0.0 < kept(columns) < 1.0


def test_the_value_of_a_variable_is_a_method_too():
    v = tf.Variable([1.0, 2.0])
    assert np.asarray(v.value()).tolist() == [1.0, 2.0]
    assert (float(v.value[1]), np.asarray(v.value + 1).tolist()) == (2.0, [2.0, 3.0])
    assert np.asarray(2 * v.value).tolist() == [2.0, 4.0]
    assert (v.value.shape, len(v.value), np.asarray(v.value).tolist()) == ((2,), 2, [1.0, 2.0])
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(v.value() ** 2)
    assert np.asarray(tape.gradient(loss, v)).tolist() == [2.0, 4.0]
    times = tf.function(lambda x: x * v.value())
    v.assign([3.0, 4.0])
    assert np.asarray(times(tf.constant(2.0))).tolist() == [6.0, 8.0]
    v.assign_add(v.value())
    assert v.numpy().tolist() == [6.0, 8.0]


def test_the_value_of_a_variable_in_a_graph():
    v1.disable_v2_behavior()
    v = v1.Variable([1.0])
    doubled = v.value() * 2.0
    with v1.Session() as session:
        session.run(v1.global_variables_initializer())
        session.run(v.assign([5.0]))
        assert session.run(doubled).tolist() == [10.0]

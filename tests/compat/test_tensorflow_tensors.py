"""What TensorFlow's tensors, shapes and variables can do and JAX's arrays cannot."""

import collections
import contextlib
import copy
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("keras")

import keras

import tailrace as tr
from tailrace.compat import ipu
from tailrace.compat import tensorflow as tf
from tailrace.compat.tensorflow import tensors
from tailrace.compat.tensorflow.compat import v1
from tailrace.errors import VersionError

# -- shapes and dtypes --------------------------------------------------------------------------------


def of_a_program():
    seen = []
    tf.function(lambda x: seen.append((x.shape, x.dtype)) or x)(tf.zeros([2, 3]))
    return seen[0]


KINDS = {
    "array": lambda: (tf.zeros([2, 3]).shape, tf.zeros([2, 3]).dtype),
    "value of a program": of_a_program,
    "variable": lambda: (tf.Variable(tf.zeros([2, 3])).shape, tf.Variable(tf.zeros([2, 3])).dtype),
    "variable by name": lambda: (
        v1.get_variable("tensors/w", [2, 3]).shape,
        v1.get_variable("tensors/w").dtype,
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_shapes_and_dtypes_have_tensorflow_s_methods(kind):
    shape, dtype = KINDS[kind]()
    assert shape.as_list() == [2, 3]
    assert (shape.rank, shape.ndims, shape.num_elements()) == (2, 2, 6)
    assert shape == [2, 3]
    assert shape == (2, 3)
    four = [4]
    assert (shape + four).as_list() == [2, 3, 4]
    assert (four + shape[1:]).as_list() == [4, 3]
    assert dtype is tf.float32
    assert (dtype.name, dtype.is_floating, dtype.is_integer) == ("float32", True, False)
    assert dtype.as_numpy_dtype is np.float32
    assert dtype.max > 1e38
    assert dtype.kind == "f", "numpy's attributes are there as well"


def test_symbolic_tensors_and_graphs_have_them_too():
    symbolic = keras.Input((3,))
    assert symbolic.shape.as_list() == [None, 3]
    assert symbolic.dtype.is_floating
    with v1.Graph().as_default():
        x = v1.placeholder(tf.float32, [None, 3])
        assert (x * 2).shape.as_list() == [None, 3]
        assert (x * 2).dtype == tf.float32
        assert v1.dimension_value(x.shape[1]) == 3
        assert v1.placeholder(tf.float32).shape.rank is None


def test_a_shape_says_what_fits_it():
    shape = tf.TensorShape([None, 3])
    assert shape.is_compatible_with([2, 3])
    assert not shape.is_compatible_with([2, 4])
    assert shape.merge_with([2, None]).as_list() == [2, 3]
    assert shape.most_specific_compatible_shape([2, 3]).as_list() == [None, 3]
    assert shape.is_subtype_of([None, None])
    assert not tf.TensorShape([None, None]).is_subtype_of(shape)
    assert tf.TensorShape(None).with_rank(2).as_list() == [None, None]
    assert (str(shape), repr(shape)) == ("(None, 3)", "TensorShape([None, 3])")
    assert str(tf.TensorShape(None)) == "<unknown>"
    assert copy.deepcopy(tf.TensorShape(None)).rank is None
    assert tf.TensorShape(None) != tf.TensorShape([])
    for wrong, text in (
        (lambda: shape.assert_has_rank(3), r"\(None, 3\) must have rank 3"),
        (lambda: shape.assert_is_compatible_with([2]), "are incompatible"),
        (lambda: shape.assert_is_fully_defined(), "is not fully defined"),
        (lambda: shape.with_rank_at_least(3), "must have rank at least 3"),
        (lambda: shape.assert_same_rank([1]), "must have the same rank"),
        (lambda: tf.TensorShape(None).as_list(), r"as_list\(\) is not defined on an unknown"),
    ):
        with pytest.raises(ValueError, match=text) as caught:
            wrong()
        assert isinstance(caught.value, tr.TailraceError)


def test_lengths_have_a_value_in_programs_of_tensorflow_1():
    shape = tf.TensorShape([2, None])
    assert shape[0] == 2
    assert shape[1] is None
    assert shape.dims[0].value == 2
    v1.disable_v2_behavior()
    assert (shape[0].value, shape[1].value) == (2, None)
    assert tf.zeros([shape[0]]).shape.as_list() == [2]


def test_set_shape_checks():
    tf.zeros([2, 3]).set_shape([None, 3])
    with pytest.raises(ValueError, match=r"shape \(2, 3\) is not compatible with supplied"):
        tf.zeros([2, 3]).set_shape([3, 3])


# -- where these are seen -----------------------------------------------------------------------------


def test_other_modules_see_what_jax_shows():
    names = {"x": tf.zeros([2, 3])}
    exec("shape, dtype = x.shape, x.dtype", names)
    assert type(names["shape"]) is tuple
    assert names["dtype"] == np.dtype("float32")
    assert type(names["dtype"]) is not type(tf.float32)
    exec("from tailrace.compat import tensorflow; shape = x.shape", names)
    assert names["shape"].as_list() == [2, 3]


def test_jax_takes_tensorflow_s_shapes_and_dtypes():
    x = tf.ones([2, 3])
    for made in (
        jnp.zeros(x.shape, x.dtype),
        jnp.broadcast_to(1.0, x.shape).astype(x.dtype),
        jax.jit(lambda y: jnp.full(y.shape, 2, y.dtype))(x),
        jax.ShapeDtypeStruct(x.shape, x.dtype),
        keras.ops.cast(keras.ops.zeros(x.shape), x.dtype),
        np.zeros(x.shape, x.dtype),
    ):
        assert tuple(made.shape) == (2, 3)
        assert made.dtype == x.dtype
    assert jnp.finfo(x.dtype).max == x.dtype.max
    assert jnp.issubdtype(x.dtype, jnp.floating)
    assert np.issubdtype(x.dtype, np.floating)


def test_the_classes_are_left_alone_until_tensorflow_is_imported():
    program = (
        "import jax.numpy as jnp, keras, sys\n"
        "from tailrace.compat import ipu, poptorch\n"
        "plain = type(jnp.zeros(1)).shape, keras.KerasTensor.shape\n"
        "assert not hasattr(jnp.zeros(1), 'get_shape'), 'before'\n"
        "assert 'tailrace.compat.tensorflow' not in sys.modules\n"
        "from tailrace.compat import tensorflow as tf\n"
        "assert jnp.zeros(1).get_shape() == [1]\n"
        "assert not hasattr(jnp.zeros(1), 'assign'), 'variables alone have it'\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_jax_whose_arrays_are_made_otherwise_is_refused(monkeypatch):
    assert all(seam.holds() for seam in tensors.SEAMS)
    monkeypatch.setattr(tensors, "kinds", lambda: (int,))
    with pytest.raises(VersionError, match="shape and dtype of arrays"):
        tensors.JAX.check(tensors.SEAMS)


# -- parts of variables -------------------------------------------------------------------------------

WRITES = {
    "one": (lambda v: v[1].assign(9.0), [1, 9, 3]),
    "slice": (lambda v: v[0:2].assign([7.0, 8.0]), [7, 8, 3]),
    "ellipsis": (lambda v: v[...].assign([7.0, 8.0, 9.0]), [7, 8, 9]),
    "computed from others": (lambda v: v[1].assign(v[0] + v[2]), [1, 4, 3]),
    "add": (lambda v: v[1].assign_add(5.0), [1, 7, 3]),
    "subtract": (lambda v: v[1:].assign_sub([1.0, 1.0]), [1, 1, 2]),
    "scatter_nd_update": (lambda v: v.scatter_nd_update([[0], [2]], [7.0, 8.0]), [7, 2, 8]),
    "scatter_nd_add": (lambda v: v.scatter_nd_add([[0], [0]], [7.0, 8.0]), [16, 2, 3]),
    "scatter_nd_sub": (lambda v: v.scatter_nd_sub([[1]], [7.0]), [1, -5, 3]),
}
MAKERS = {
    "tf.Variable": lambda: tf.Variable([1.0, 2.0, 3.0]),
    "get_variable": lambda: ipu.Variable([1.0, 2.0, 3.0]),
}


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("write", WRITES)
def test_a_part_of_a_variable_is_assigned(write, make):
    act, expected = WRITES[write]
    variable = MAKERS[make]()
    assert act(variable) is variable
    assert variable.numpy().tolist() == expected


@pytest.mark.parametrize("make", MAKERS)
def test_a_part_is_assigned_in_a_program(make):
    variable = MAKERS[make]()

    def step(x):
        variable[1].assign(x)
        variable[0].assign_add(variable[1])
        return variable[0]

    assert ipu.ipu_compiler.compile(step, [5.0])()[0].item() == 6.0
    assert variable.numpy().tolist() == [6, 5, 3]


@pytest.mark.parametrize("make", ["get_variable", "Variable"])
def test_a_part_is_assigned_when_a_session_runs(make):
    with v1.Graph().as_default(), v1.Session() as session:
        if make == "get_variable":
            variable = v1.get_variable("w", initializer=[1.0, 2.0, 3.0])
        else:
            variable = tf.Variable([1.0, 2.0, 3.0])
        session.run(v1.global_variables_initializer())
        update = variable[1].assign(9.0)
        scatter = v1.scatter_add(variable, [0, 0], [1.0, 2.0])
        nd = v1.scatter_nd_update(variable, [[2]], [0.0])
        assert session.run(variable).tolist() == [1, 2, 3], "described, not done"
        session.run(update)
        assert session.run(variable).tolist() == [1, 9, 3]
        session.run([scatter, nd])
        assert session.run(variable).tolist() == [4, 9, 0]


def test_a_tensor_that_is_no_part_of_a_variable_has_no_assign():
    part = tf.Variable([1.0, 2.0])[0]
    for tensor in (part + 1, tf.constant(1.0), part):  # its variable is gone
        assert not hasattr(tensor, "assign")
    with pytest.raises(AttributeError, match=r"for parts of them.*v\[1\]\.assign\(x\)"):
        tf.constant(1.0).assign(2.0)


@pytest.mark.parametrize("make", MAKERS)
def test_a_variable_is_iterated_row_by_row(make):
    variable = MAKERS[make]()
    assert [float(x) for x in variable] == [1, 2, 3]
    assert len(variable) == 3
    first, *_ = variable
    first.assign(5.0)
    assert float(variable[0]) == 5.0


def test_variables_and_tensors_are_found_again_by_reference():
    v, x = tf.Variable([1.0]), tf.constant([1.0])
    found = {v.ref(): "variable", x.ref(): "tensor"}
    assert found[v.ref()] == "variable"
    assert found[x.ref()] == "tensor"
    assert v.ref().deref() is v
    assert v.ref() != tf.Variable([1.0]).ref()


def test_a_variable_without_a_value_decides_nothing():
    assert bool(tf.Variable(True))
    with v1.Graph().as_default():
        w = v1.get_variable("w", initializer=True)
        with pytest.raises(RuntimeError, match="no value before a session runs it"):
            bool(w)


def test_a_loop_that_python_cannot_end_is_refused():
    @tf.function(autograph=False)
    def add_up(n):
        total = tf.constant(0)
        for i in tf.range(n):
            total += i
        return total

    with pytest.raises(tr.TailraceError, match=r"`for` over tf\.range\(n\).*was left to Python"):
        add_up(tf.constant(3))


def test_modules_in_modules_are_found():
    outer, inner = tf.Module(name="outer"), tf.Module()
    outer.parts, inner.w, inner.outer = [inner], tf.Variable(1.0), outer
    assert outer.submodules == (inner,)
    assert len(outer.variables) == 1


def test_a_generator_s_signature_is_given_in_our_specs():
    pytest.importorskip("tensorflow")
    signature = {"x": tf.TensorSpec([2], tf.float32), "y": tf.TensorSpec([], tf.int32)}
    rows = tf.data.Dataset.from_generator(
        lambda: iter([{"x": [1.0, 2.0], "y": 3}]), output_signature=signature
    )
    (row,) = rows
    assert row["x"].numpy().tolist() == [1, 2]
    assert rows.element_spec["y"].dtype.name == "int32"


# -- nests --------------------------------------------------------------------------------------------


def test_nests_are_in_the_order_of_their_keys():
    assert tf.nest.flatten({"b": 1, "a": 2}) == [2, 1]
    assert tf.nest.pack_sequence_as({"b": 0, "a": 0}, [1, 2]) == {"b": 2, "a": 1}
    added = tf.nest.map_structure(lambda x, y: x + y, {"a": 1, "b": 2}, {"b": 10, "a": 20})
    assert added == {"a": 21, "b": 12}
    ordered = collections.OrderedDict(b=1, a=2)
    assert tf.nest.map_structure(str, ordered) == collections.OrderedDict(b="1", a="2")
    assert tf.nest.flatten([1, None, tf.TensorShape([2])]) == [1, None, tf.TensorShape([2])]
    with pytest.raises(ValueError, match=r"as many leaves as the structure has, 2\. Received: 1"):
        tf.nest.pack_sequence_as([0, 0], [1])


def test_a_session_fetches_named_tuples():
    Pair = collections.namedtuple("Pair", "a b")
    with v1.Graph().as_default(), v1.Session() as session:
        x = v1.placeholder(tf.float32, [])
        found = session.run(Pair(x + 1, {"c": x}), {x: 2.0})
    assert isinstance(found, Pair)
    assert (found.a, found.b["c"]) == (3.0, 2.0)


# -- what TensorFlow 1 computes otherwise -------------------------------------------------------------


@contextlib.contextmanager
def session():
    with v1.Graph().as_default(), v1.Session() as opened:
        yield opened


def test_the_second_argument_of_dropout_is_what_stays():
    with session() as opened:
        kept = opened.run(v1.nn.dropout(tf.ones([4000]), 0.9))
        assert 0.85 < (kept != 0).mean() < 0.95
        named = opened.run(v1.nn.dropout(tf.ones([4000]), rate=0.9))
        assert (named != 0).mean() < 0.15
        assert opened.run(v1.nn.dropout(tf.ones([4]), 1.0)).tolist() == [1, 1, 1, 1]
    with pytest.raises(tr.TailraceError, match="takes keep_prob or rate"):
        v1.nn.dropout(tf.ones([4]))
    assert (np.asarray(tf.nn.dropout(tf.ones([4000]), 0.9)) != 0).mean() < 0.15


def test_a_vector_of_conditions_chooses_rows():
    chosen, x, y = [True, False], [[1, 2], [3, 4]], [[5, 6], [7, 8]]
    assert v1.where(chosen, x, y).tolist() == [[1, 2], [7, 8]]
    assert tf.where(chosen, x, y).tolist() == [[1, 6], [3, 8]]
    assert v1.where(chosen, [1, 2], [3, 4]).tolist() == [1, 4]


def test_a_loop_over_one_value_returns_it_by_itself():
    with session() as opened:
        assert opened.run(v1.while_loop(lambda i: i < 3, lambda i: i + 1, [tf.constant(0)])) == 3
    (found,) = tf.while_loop(lambda i: i < 3, lambda i: [i + 1], [tf.constant(0)])
    assert found == 3


def test_losses_are_collected_and_reduced_as_asked():
    labels, given = tf.constant([1.0, 2.0]), tf.constant([2.0, 4.0])
    with session() as opened:
        w = v1.get_variable("w", [2], initializer=v1.ones_initializer)
        v1.add_to_collection("losses", tf.nn.l2_loss(w))
        v1.losses.mean_squared_error(labels, given)
        v1.losses.huber_loss(labels, given, loss_collection=None)
        assert opened.run(v1.losses.get_total_loss()) == 3.5
        assert len(v1.get_collection(v1.GraphKeys.LOSSES)) == 2
    summed = v1.losses.mean_squared_error(labels, given, reduction=v1.losses.Reduction.SUM)
    assert float(summed) == 5.0
    assert float(v1.losses.mean_squared_error(labels, given, [1.0, 0.0])) == 1.0
    smoothed = v1.losses.softmax_cross_entropy([[0.0, 1.0]], [[2.0, 3.0]], label_smoothing=0.1)
    assert float(smoothed) == pytest.approx(0.3633, abs=1e-4)
    smoothed = v1.losses.sigmoid_cross_entropy([[0.0, 1.0]], [[2.0, 3.0]], label_smoothing=0.2)
    assert float(smoothed) == pytest.approx(1.1378, abs=1e-4)
    assert float(v1.losses.huber_loss(labels, given)) == 1.0
    assert float(v1.losses.log_loss([1.0, 0.0], [0.9, 0.2])) == pytest.approx(0.1643, abs=1e-4)
    with v1.Graph().as_default(), pytest.raises(tr.TailraceError, match="there are none"):
        v1.losses.get_total_loss()
    with pytest.raises(tr.TailraceError, match="reduction is one of tf.losses.Reduction"):
        v1.losses.mean_squared_error(labels, given, reduction="mean")


def test_older_names_and_arguments_of_tensorflow_1():
    image = tf.reshape(tf.range(9.0), [1, 3, 3, 1])
    pooled = v1.nn.max_pool(value=image, ksize=[1, 2, 2, 1], strides=[1, 1, 1, 1], padding="VALID")
    assert pooled.shape.as_list() == [1, 2, 2, 1]
    assert v1.expand_dims([1, 2], dim=0).shape.as_list() == [1, 2]
    assert v1.nn.softmax([[1.0, 1.0]], dim=-1).tolist() == [[0.5, 0.5]]
    assert v1.nn.moments(tf.ones([2, 2]), [0], keep_dims=True)[0].shape.as_list() == [1, 2]
    assert v1.nn.in_top_k([[1.0, 2.0, 3.0]], [1], 2).tolist() == [True]
    assert v1.is_nan([1.0]).tolist() == [False]
    assert v1.matrix_band_part(tf.ones([2, 2]), -1, 0).tolist() == [[1, 0], [1, 1]]
    assert v1.nn.relu([-1.0]).tolist() == [0.0], "others are TensorFlow 2's"
    with v1.Graph().as_default():
        v1.get_variable("w", initializer=2.0, collections=["mine", v1.GraphKeys.GLOBAL_VARIABLES])
        assert len(v1.get_collection("mine")) == 1


# -- arguments that would be lost ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: tf.reduce_sum([1.0], axes=0), "has no argument 'axes'"),
        (lambda: tf.argmax([1.0], axi=0), "has no argument 'axi'"),
        (lambda: tf.squeeze([1.0], dims=0), "has no argument 'dims'"),
        (lambda: tf.matmul([[1.0]], [[1.0]], transpose=True), "has no argument 'transpose'"),
        (lambda: tf.nn.dropout([1.0], prob=0.5), "has no argument 'prob'"),
        (lambda: tf.math.bincount([1], maxlength=2), r"tf\.math\.bincount takes arr.*'maxlength'"),
        (lambda: tf.linalg.diag([1.0], k=1), r"tf\.linalg\.diag takes diagonal.*'k'"),
        (lambda: tf.nn.embedding_lookup([[1.0], [2.0]], [0]), "takes one table.*a list of 2"),
    ],
)
def test_an_argument_is_refused_rather_than_lost(call, text):
    with pytest.raises(tr.TailraceError, match=text):
        call()

"""Every operation of `tf` against TensorFlow itself, on several dtypes."""

import numpy as np
import pytest

from oracles import assert_close

real = pytest.importorskip("tensorflow")
pytest.importorskip("keras")

from tailrace.compat import tensorflow as tf  # noqa: E402
from tailrace.compat.ipu.errors import IPUValueError  # noqa: E402
from tailrace.compat.tensorflow import host  # noqa: E402
from tailrace.compat.tensorflow.compat import v1  # noqa: E402, F401  (fills the table)
from tailrace.compat.tensorflow.operations.elementwise import BINARY, UNARY  # noqa: E402
from tailrace.compat.tensorflow.operations.neural import ACTIVATIONS  # noqa: E402
from tailrace.compat.tensorflow.operations.reductions import REDUCTIONS  # noqa: E402
from tailrace.compat.tensorflow.operations.table import OPERATIONS  # noqa: E402

RANDOM = np.random.default_rng(0)


def floats(*shape, low=0.1, high=0.9, dtype="float32"):
    return RANDOM.uniform(low, high, shape).astype(dtype)


def named(module, path):
    for part in path.split("."):
        module = getattr(module, part)
    return module


def plain(value):
    if isinstance(value, list | tuple):
        return [leaf for inner in value for leaf in as_list(plain(inner))]
    return np.asarray(value)


def as_list(value):
    return value if isinstance(value, list) else [value]


def compare(path, args, kwargs=None, dtypes=True):
    ours = plain(named(tf, path)(*args, **(kwargs or {})))
    theirs = plain(named(real, path)(*args, **(kwargs or {})))
    ours, theirs = as_list(ours), as_list(theirs)
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert one.shape == other.shape
        if dtypes:
            narrow = {"int64": "int32", "float64": "float32", "uint64": "uint32"}
            assert str(one.dtype) == narrow.get(str(other.dtype), str(other.dtype))
        if other.dtype.kind in "biu":
            assert np.array_equal(one, other)
        else:
            assert_close(one, other.astype(one.dtype))


BOOLEAN = {"logical_not", "logical_and", "logical_or", "logical_xor", "reduce_all", "reduce_any"}
FLOAT16 = {"abs", "cos", "exp", "floor", "log", "negative", "sigmoid", "sqrt", "square", "tanh"}
INTEGERS = {"abs", "negative", "sign", "square"}
COMPLEX = {"angle", "conj", "imag", "real"}
ABOVE_ONE = {"acosh"}


@pytest.mark.parametrize("name", sorted(UNARY))
def test_functions_of_one_tensor(name):
    if name in BOOLEAN:
        compare(f"math.{name}", [np.array([True, False])])
        return
    if name in COMPLEX:
        compare(f"math.{name}", [np.array([1 + 2j, -0.5 + 0.1j], np.complex64)])
        return
    x = floats(2, 3) + (1 if name in ABOVE_ONE else 0)
    if name in ("rint", "round", "floor", "ceil", "is_finite", "is_inf", "is_nan"):
        x = np.array([-1.5, 0.5, 2.5, np.inf, np.nan], np.float32)
    compare(f"math.{name}", [x])
    if name in FLOAT16:
        compare(f"math.{name}", [x.astype(np.float16)])
    if name in INTEGERS:
        compare(f"math.{name}", [np.array([-3, 0, 4], np.int32)])


@pytest.mark.parametrize("name", sorted(BINARY))
def test_functions_of_two_tensors(name):
    if name in BOOLEAN:
        compare(f"math.{name}", [np.array([True, False]), np.array([True, True])])
        return
    compare(f"math.{name}", [floats(2, 3), floats(3)])
    if name not in ("atan2", "divide_no_nan"):
        compare(
            f"math.{name}",
            [np.array([-7, 4], np.int32), np.array([2, 3], np.int32)],
            None,
            name not in ("divide", "truediv"),
        )


@pytest.mark.parametrize("name", sorted(REDUCTIONS))
@pytest.mark.parametrize(
    "options", [{}, {"axis": 1}, {"axis": [0, 1], "keepdims": True}, {"axis": []}]
)
def test_reductions(name, options):
    x = np.array([[True, False], [True, True]]) if name in BOOLEAN else floats(3, 4)
    compare(f"math.{name}", [x], options)


@pytest.mark.parametrize("name", ["reduce_sum", "reduce_mean", "reduce_max", "reduce_prod"])
def test_reductions_of_integers_and_halves_keep_the_dtype(name):
    compare(f"math.{name}", [np.array([[1, 2], [3, 5]], np.int32)])
    compare(f"math.{name}", [np.array([[1, 2], [3, 5]], np.float16)])
    compare(f"math.{name}", [np.array([[1, 2], [3, 5]], np.int8)])


@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
def test_activations(name):
    compare(f"nn.{name}", [floats(2, 3, low=-3, high=7)])


A, B = floats(3, 3), floats(3, 3)
SQUARE = A @ A.T + 3 * np.eye(3, dtype="float32")
IMAGE, KERNEL = floats(2, 6, 5, 3), floats(3, 3, 3, 4)
LOGITS, LABELS = floats(4, 5, low=-3, high=3), np.array([0, 4, 2, 1], np.int32)
SHARES = np.eye(5, dtype="float32")[LABELS]
INTS = np.array([3, 1, 2, 1], np.int32)

CASES = {
    "math.atan2": [(A, B)],
    "math.squared_difference": [(A, B)],
    "math.multiply_no_nan": [
        (np.array([np.nan, 2.0], np.float32), np.array([0.0, 3.0], np.float32))
    ],
    "math.xlogy": [(np.array([0.0, 2.0], np.float32), np.array([0.0, 3.0], np.float32))],
    "math.xdivy": [(np.array([0.0, 2.0], np.float32), np.array([0.0, 3.0], np.float32))],
    "math.add_n": [([A, B, A],)],
    "clip_by_value": [(A, 0.3, 0.6)],
    "clip_by_norm": [(A, 0.5), (A, 50.0)],
    "linalg.global_norm": [([A, None, B],)],
    "clip_by_global_norm": [([A, B], 0.5)],
    "identity": [(A,)],
    "stop_gradient": [(A,)],
    "bitwise.bitwise_and": [(INTS, INTS[::-1].copy())],
    "bitwise.bitwise_or": [(INTS, INTS[::-1].copy())],
    "bitwise.bitwise_xor": [(INTS, INTS[::-1].copy())],
    "bitwise.left_shift": [(INTS, INTS)],
    "bitwise.right_shift": [(INTS, INTS)],
    "bitwise.invert": [(INTS,)],
    "math.argmax": [(A,), (A, 1), (A, -1, "int32")],
    "math.argmin": [(A,), (A, 1)],
    "math.count_nonzero": [(INTS,), (A, 1)],
    "math.zero_fraction": [(np.array([0.0, 1.0, 0.0], np.float32),)],
    "math.cumsum": [(A,), (A, 1), (A, 0, True), (A, 1, False, True), (INTS, 0, True, True)],
    "math.cumprod": [(A,), (A, 1, True, True)],
    "sort": [(A,), (A, 0, "DESCENDING")],
    "searchsorted": [
        (np.float32([1, 3, 5]), np.float32([0, 3, 9])),
        (np.float32([[1, 3], [2, 4]]), np.float32([[3], [3]]), "right"),
    ],
    "argsort": [(INTS,), (A, 0, "DESCENDING")],
    "math.top_k": [(A, 2)],
    "math.in_top_k": [(LABELS, LOGITS, 2)],
    "math.bincount": [(INTS,)],
    **{f"math.segment_{n}": [(A, np.array([0, 0, 1]))] for n in ("max", "min", "prod", "sum")},
    **{
        f"math.unsorted_segment_{n}": [(A, np.array([1, 0, 1]), 2)]
        for n in ("max", "min", "prod", "sum")
    },
    "constant": [([1, 2],), (1.5, "float16"), (2.0, None, [2, 3]), ([1, 2, 3, 4], "int32", [2, 2])],
    "convert_to_tensor": [(A,), ([1, 2], "float32")],
    "zeros": [([2, 3],), (3, "int32")],
    "ones": [([2, 3],), ([], "float16")],
    "fill": [([2, 3], 4), (INTS[:2], 1.5)],
    "zeros_like": [(A,), (A, "int32")],
    "ones_like": [(A,), (A, "int32")],
    "eye": [(3,), (2, 3), (2, None, [4])],
    "linspace": [(0.0, 1.0, 5)],
    "one_hot": [
        (INTS, 4),
        (INTS, 4, 5.0, -1.0),
        (INTS, 4, None, None, 0),
        (INTS, 4, None, None, None, "int32"),
    ],
    "sequence_mask": [(INTS,), (INTS, 5, "float32")],
    "meshgrid": [(A[1], A[0]), ([1, 2], [3, 4, 5])],
    "cast": [(A * 10, "int32"), (INTS, "float16"), (np.array([True]), "float32")],
    "bitcast": [(A, "int32"), (A, "uint8"), (np.arange(8, dtype="uint8").reshape(2, 4), "int32")],
    "shape": [(A,)],
    "size": [(A,)],
    "rank": [(A,)],
    "reshape": [(A, [9]), (A, (-1, 1)), (A, INTS[:1] * 3)],
    "expand_dims": [(A, 0), (A, -1)],
    "ensure_shape": [(A, [None, A.shape[1]])],
    "squeeze": [(A[None],), (A[None, :, None], [0, 2])],
    "transpose": [(A,), (IMAGE, [0, 3, 1, 2])],
    "concat": [([A, B], 0), ([A, B], -1)],
    "stack": [([A, B],), ([A, B], 1)],
    "unstack": [(A,), (A, None, 1)],
    "split": [(A, 3), (A, [1, 2], 1), (A, [1, -1])],
    "tile": [(A, [2, 1])],
    "repeat": [(A, 2, 1), (INTS, 2), (A, [2, 0, 1], 0)],
    "pad": [
        (A, [[1, 0], [0, 2]]),
        (A, [[1, 1], [1, 1]], "REFLECT"),
        (A, [[1, 1], [0, 0]], "CONSTANT", 7.0),
    ],
    "broadcast_to": [(A[0], [2, 3])],
    "reverse": [(A, [0]), (A, [0, 1])],
    "roll": [(A, 1, 0)],
    "where": [(A > 0.5, A, B), (np.array([True, False, True]),)],
    "gather": [(A, [0, 2]), (A, [[0, 2]], None, 1), (A, [[0], [1], [2]], None, None, 1)],
    "gather_nd": [(A, [[0, 1], [2, 2]]), (A, [[1]]), (A, [[[1], [0]], [[2], [2]], [[0], [1]]], 1)],
    "slice": [(A, [0, 1], [2, -1])],
    "boolean_mask": [(A, np.array([True, False, True]))],
    "unique": [(INTS,)],
    "scatter_nd": [([[1], [3]], INTS[:2], [5])],
    **{
        f"tensor_scatter_nd_{n}": [(INTS, [[1], [3]], INTS[:2])]
        for n in ("update", "add", "sub", "max", "min")
    },
    **{f"experimental.numpy.{n}": [([A, B],)] for n in ("dstack", "hstack", "vstack")},
    "experimental.numpy.dsplit": [(IMAGE[0], 3)],
    "experimental.numpy.hsplit": [(A, 3)],
    "experimental.numpy.vsplit": [(A, 3)],
    "linalg.matmul": [(A, B), (A, B, True), (A, B, False, True)],
    "linalg.matvec": [(A, B[0]), (A, B[0], True)],
    "tensordot": [(A, B, 1), (A, B, [[0], [1]])],
    "einsum": [("ij,kj->ik", A, B)],
    "norm": [(A,), (A, 1), (A, "euclidean", 1)],
    "linalg.band_part": [(A, 1, 0), (A, -1, 0)],
    "linalg.diag": [(A,)],
    "linalg.solve": [(SQUARE, B)],
    "linalg.triangular_solve": [(np.tril(SQUARE), B)],
    "linalg.svd": [(A, False, False)],
    "linalg.qr": [],
    "linalg.cholesky": [(SQUARE,)],
    "linalg.det": [(SQUARE,)],
    "linalg.diag_part": [(A,)],
    "linalg.eigh": [],
    "linalg.inv": [(SQUARE,)],
    "linalg.logdet": [(SQUARE,)],
    "linalg.matrix_transpose": [(A,)],
    "linalg.pinv": [(SQUARE,)],
    "linalg.slogdet": [(SQUARE,)],
    "linalg.trace": [(A,)],
    "nn.gelu": [(LOGITS,), (LOGITS, True)],
    "nn.leaky_relu": [(LOGITS,), (LOGITS, 0.1)],
    "nn.softmax": [(LOGITS,), (LOGITS, 0)],
    "nn.log_softmax": [(LOGITS,), (LOGITS, 0)],
    "nn.crelu": [(LOGITS,)],
    "nn.sigmoid_cross_entropy_with_logits": [(SHARES, LOGITS)],
    "nn.softmax_cross_entropy_with_logits": [(SHARES, LOGITS)],
    "nn.sparse_softmax_cross_entropy_with_logits": [(LABELS, LOGITS)],
    "nn.l2_loss": [(A,)],
    "nn.l2_normalize": [(A,), (A, 1)],
    "nn.moments": [(IMAGE, [0, 1, 2]), (A, [0], None, True)],
    "nn.batch_normalization": [
        (A, A[0], A[1], A[2], B[0], 1e-3),
        (A, A[0], A[1], None, None, 1e-3),
    ],
    "nn.bias_add": [(A, A[0])],
    "nn.embedding_lookup": [(A, [2, 0])],
    "nn.conv1d": [(IMAGE[0], KERNEL[0], 1, "SAME"), (IMAGE[0], KERNEL[0], 2, "VALID")],
    "nn.conv2d": [(IMAGE, KERNEL, 1, "SAME"), (IMAGE, KERNEL, [1, 2, 2, 1], "VALID")],
    "nn.conv3d": [(IMAGE[None], floats(2, 2, 2, 3, 2), [1, 1, 1, 1, 1], "SAME")],
    "nn.depthwise_conv2d": [(IMAGE, KERNEL[..., :2], [1, 1, 1, 1], "SAME")],
    "nn.conv2d_transpose": [
        (IMAGE, KERNEL.transpose(0, 1, 3, 2), [2, 12, 9, 4], 2),
        (IMAGE, KERNEL.transpose(0, 1, 3, 2), [2, 8, 7, 4], [1, 1, 1, 1], "VALID"),
    ],
    "nn.space_to_depth": [(floats(2, 4, 6, 3), 2)],
    "nn.depth_to_space": [(floats(2, 2, 3, 8), 2)],
    "nn.max_pool1d": [(IMAGE[0], 2, 2, "VALID")],
    "nn.avg_pool1d": [(IMAGE[0], 2, 2, "VALID")],
    "nn.max_pool2d": [(IMAGE, 2, 2, "VALID"), (IMAGE, [1, 3, 3, 1], [1, 2, 2, 1], "SAME")],
    "nn.avg_pool2d": [(IMAGE, 2, 2, "VALID"), (IMAGE, 3, 2, "SAME")],
    "nn.max_pool3d": [(IMAGE[None], 2, 1, "SAME")],
    "nn.avg_pool3d": [(IMAGE[None], 2, 1, "VALID")],
    "range": [(5,), (1, 7, 2), (0.0, 1.0, 0.25)],
    "map_fn": [(lambda x: x * 2, A)],
    "vectorized_map": [(lambda x: x * 2, A)],
    "scan": [(lambda a, x: a + x, A), (lambda a, x: a + x, A, np.zeros(3, np.float32))],
    "foldl": [(lambda a, x: a + x, A)],
    "compat.v1.losses.sparse_softmax_cross_entropy": [(LABELS, LOGITS)],
    "compat.v1.losses.softmax_cross_entropy": [(SHARES, LOGITS)],
    "compat.v1.losses.sigmoid_cross_entropy": [(SHARES, LOGITS)],
    "compat.v1.losses.mean_squared_error": [(A, B), (A, B, 0.5)],
    "compat.v1.losses.absolute_difference": [(A, B)],
    "compat.v1.losses.huber_loss": [(A, B), (A, B, 0.5)],
    "compat.v1.losses.log_loss": [(SHARES, SHARES)],
    "compat.v1.where": [(A > 0, A, B), (A[:, 0] > 0, A, B), (A[:, 0] > 0, A[:, 0], B[:, 0])],
    "compat.v1.expand_dims": [(A, 1)],
    "compat.v1.nn.softmax": [(LOGITS,), (LOGITS, 0)],
    "compat.v1.nn.log_softmax": [(LOGITS,), (LOGITS, 0)],
    "compat.v1.nn.moments": [(IMAGE, [0, 1, 2])],
    "compat.v1.nn.in_top_k": [(LOGITS, LABELS, 2)],
    "compat.v1.nn.max_pool": [(IMAGE, [1, 3, 3, 1], [1, 2, 2, 1], "SAME")],
    "compat.v1.nn.avg_pool": [(IMAGE, [1, 3, 3, 1], [1, 2, 2, 1], "SAME")],
    "compat.v1.nn.conv1d": [(IMAGE[0], KERNEL[0], 1, "SAME")],
    "compat.v1.nn.bias_add": [(A, A[0])],
    "compat.v1.div": [(A, B), (np.int32([7, -7]), np.int32([2, 2]))],
}

ELSEWHERE = {
    "gradients": "graphs",
    "compat.v1.nn.embedding_lookup": "versions",
    "compat.v1.nn.softmax_cross_entropy_with_logits": "versions",
    **dict.fromkeys([p for p in OPERATIONS if p.startswith("train.")], "graphs"),
    "cond": "loops and branches",
    "while_loop": "loops and branches",
    "custom_gradient": "tapes",
    "recompute_grad": "tapes",
    "group": "sessions",
    "no_op": "sessions",
    "saturate_cast": "limits",
    "print": "printed",
    "switch_case": "programs",
    "case": "programs",
    "truncatediv": "programs",
    "truncatemod": "programs",
    "strided_slice": "programs",
    **dict.fromkeys([p for p in OPERATIONS if p.startswith("debugging.")], "programs"),
    **dict.fromkeys([p for p in OPERATIONS if p.startswith("random.")], "drawn"),
    "nn.dropout": "drawn",
    "compat.v1.nn.dropout": "drawn",
    "compat.v1.while_loop": "tensors",
}
"""What has tests of its own."""


@pytest.mark.parametrize("path", [p for p in CASES if CASES[p]])
def test_operations(path):
    exact = path != "math.bincount"
    for case in CASES[path]:
        compare(path, list(case), dtypes=exact)


def test_every_operation_is_compared():
    swept = {f"math.{n}" for n in (*UNARY, *BINARY, *REDUCTIONS)} | {f"nn.{n}" for n in ACTIVATIONS}
    known = {id(OPERATIONS[p]) for p in (*CASES, *ELSEWHERE, *swept)}
    assert not [path for path, one in OPERATIONS.items() if id(one) not in known]


def test_every_operation_is_a_name_of_tensorflow():
    assert not [
        path for path in OPERATIONS if not host.has(path) and not host.has(f"compat.v1.{path}")
    ]


def test_random_numbers_have_the_shape_and_the_moments():
    tf.random.set_seed(7)
    x = tf.random.normal([1000], 2.0, 0.5)
    tf.random.set_seed(7)
    assert np.array_equal(x, tf.random.normal([1000], 2.0, 0.5))
    assert abs(float(tf.reduce_mean(x)) - 2) < 0.1
    assert x.dtype == tf.float32
    assert not np.array_equal(x, tf.random.normal([1000], 2.0, 0.5))
    assert set(np.asarray(tf.random.uniform([50], 0, 3, tf.int32))) <= {0, 1, 2}
    drawn = tf.random.uniform([100], -1.0, 1.0)
    assert float(tf.reduce_min(drawn)) < -0.5
    assert float(tf.reduce_max(drawn)) > 0.5
    assert float(tf.reduce_max(tf.abs(tf.random.truncated_normal([500])))) <= 2
    assert sorted(np.asarray(tf.random.shuffle(tf.range(5)))) == [0, 1, 2, 3, 4]
    assert tf.random.categorical(tf.zeros([2, 3]), 4).shape == (2, 4)
    assert np.array_equal(
        tf.random.stateless_normal([3], [1, 2]), tf.random.stateless_normal([3], [1, 2])
    )
    dropped = tf.nn.dropout(tf.ones([1000]), 0.25)
    assert 0.15 < float(tf.math.zero_fraction(dropped)) < 0.35


def test_in_a_dataset_operations_are_tensorflow_s():
    ds = real.data.Dataset.from_tensor_slices(np.arange(4)).map(
        lambda x: tf.cast(tf.one_hot(x, 4), tf.int32)
    )
    assert [np.asarray(x).tolist() for x in ds][1] == [0, 1, 0, 0]
    texts = real.constant(["a", "b"])
    assert np.asarray(tf.reshape(texts, [2, 1])).tolist() == [[b"a"], [b"b"]]


def test_tensors_of_tensorflow_are_arrays():
    import jax

    assert isinstance(tf.reduce_sum(real.constant([1.0, 2.0])), jax.Array)


WIDE = np.float32([np.inf, -np.inf, 3e9, -3e9, 300.7, -300.7, 1.9, -1.9, 7e4])
WHOLE = np.int32([-(2**31), 2**31 - 1, 70000, -300, 5])
NARROW = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "float16", "bfloat16")


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.filterwarnings("ignore:overflow encountered in cast")  # of TensorFlow's own limits
def test_saturate_cast_ends_at_the_limits(dtype):
    for given in (WIDE, WHOLE, np.float16([7e4, -np.inf, 300.5]), np.uint8([0, 200])):
        compare("saturate_cast", (given, dtype))


def test_saturate_cast_keeps_a_nan_and_takes_numbers():
    """To whole numbers a NaN is undefined in TensorFlow; here it is what `tf.cast` makes of it."""
    found = tf.saturate_cast(np.float32([np.nan, 1e30]), "float16")
    assert np.isnan(found[0])
    assert found[1] == 65504
    assert tf.saturate_cast(np.float32(np.nan), "int8") == tf.cast(np.float32(np.nan), "int8")
    assert tf.saturate_cast(np.complex64(300 + 2j), "uint8") == 255
    with pytest.raises(IPUValueError, match=r"a bool has no range.*tf.float32 to tf.bool.*tf.cast"):
        tf.saturate_cast(A, "bool")

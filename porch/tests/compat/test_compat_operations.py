"""Small operations of the original, against what `jax.numpy` makes of the same values."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from counting import run, use

import tailrace as tr
from oracles import assert_bits_equal, assert_close
from tailrace.compat import ipu
from tailrace.compat.ipu import ipu_compiler, loops
from tailrace.compat.ipu.ipu_outfeed_queue import IPUOutfeedQueue

RNG = np.random.default_rng(0)


def on_each(function, values):
    """What `function` makes of each replica's value, on each of them."""
    out = IPUOutfeedQueue()
    held = jnp.asarray(values)
    run(lambda: loops.repeat(1, lambda: out.enqueue(function(held[tr.replica()]))))
    return np.asarray(out.dequeue())[0]


@pytest.mark.parametrize("dtype", ["float32", "float16", "int32", "int8", "uint8", "bool"])
@pytest.mark.parametrize("size", [2, 4])
def test_gathering(dtype, size):
    use(4)
    values = (RNG.normal(size=(4, 3)) * 5).astype(dtype)
    found = on_each(lambda x: ipu.ops.all_to_all_op.all_gather(x, size), values)
    groups = values.reshape(4 // size, size, 3)
    assert_bits_equal(found, np.repeat(groups, size, axis=0))


def test_gathering_a_list():
    use(2)
    values = np.float32([1, 2])
    found = on_each(lambda x: jnp.stack(ipu.all_to_all_op.all_gather([x, -x], 2)), values)
    assert found.tolist() == [[[1, 2], [-1, -2]]] * 2


@pytest.mark.parametrize(("split", "concat"), [(0, 0), (0, 1), (1, 0), (1, 1)])
def test_all_to_all(split, concat):
    use(2)
    values = RNG.normal(size=(2, 4, 6)).astype(np.float32)
    found = on_each(lambda x: ipu.all_to_all_op.all_to_all(x, split, concat, 2), values)
    for replica in range(2):
        parts = [np.split(value, 2, axis=split)[replica] for value in values]
        assert_bits_equal(found[replica], np.concatenate(parts, axis=concat))
    with pytest.raises(ipu.errors.InvalidArgumentError, match="of size 4, into 3 equal parts"):
        on_each(lambda x: ipu.all_to_all_op.all_to_all(x, 0, 0, 3), values)


REDUCTIONS = {
    "ADD": lambda x: x.sum(0),
    "MUL": lambda x: x.prod(0),
    "MIN": lambda x: x.min(0),
    "MAX": lambda x: x.max(0),
    "SQUARE_ADD": lambda x: (x * x).sum(0),
    "MEAN": lambda x: x.mean(0),
}


@pytest.mark.parametrize("op", REDUCTIONS)
def test_reduced_and_scattered(op):
    use(2)
    values = RNG.normal(size=(2, 5)).astype(np.float32)
    found = on_each(
        lambda x: ipu.reduce_scatter_op.reduce_scatter(x, 2, f"COLLECTIVE_OP_{op}"), values
    )
    assert_close(found.reshape(-1), np.pad(REDUCTIONS[op](values), (0, 1)))


def test_scattered_without_being_reduced():
    use(2)
    values = np.float32([[1, 2, 3], [4, 5, 6]])
    take = ipu.reduce_scatter_op.reduce_scatter
    assert on_each(lambda x: take(x, 2, "COLLECTIVE_OP_LOCAL"), values).tolist() == [[1, 2], [6, 0]]
    logical = np.array([[True, False], [True, True]])
    assert on_each(lambda x: take(x, 2, "COLLECTIVE_OP_LOGICAL_AND"), logical).tolist() == [
        [True],
        [False],
    ]
    with pytest.raises(ValueError, match="COLLECTIVE_OP_XOR is not a valid reduction"):
        on_each(lambda x: take(x, 2, "COLLECTIVE_OP_XOR"), values)
    with pytest.raises(ValueError, match="values of one dimension"):
        on_each(lambda x: take(x[None], 2), values)


def test_the_number_of_the_replica():
    use(4)
    found = on_each(lambda _: ipu.replication_ops.replication_index(), np.zeros(4, np.float32))
    assert found.tolist() == [0, 1, 2, 3]


def test_what_is_assumed_equal_may_be_returned():
    use(2)
    with pytest.raises(tr.TailraceError, match="equal"):
        run(lambda: tr.replica() * 0)
    assert (
        run(
            lambda: ipu.cross_replica_ops.assume_equal_across_replicas({"a": tr.replica() * 0})["a"]
        )[0]
        == 0
    )


def test_values_that_come_back_as_they_are():
    value = jnp.float32([1, 2])
    nest = {"a": value, "b": [value * 2]}
    assert_bits_equal(ipu.control_flow_ops.barrier(nest), nest)
    assert_bits_equal(ipu.internal_ops.remap(value), value)
    assert_bits_equal(ipu.internal_ops.remap_deduce(value), value)
    gradient = jax.grad(lambda x: ipu.control_flow_ops.barrier(x) ** 2)(jnp.float32(3))
    assert gradient == 6

    @ipu.outlined_function
    def plain(x):
        return x + 1

    @ipu.outlined_function(unique_sharding=True)
    def with_arguments(x):
        return x + 1

    @ipu.nn_ops.multi_conv
    def convolutions(x):
        return x + 1

    assert plain(1) == with_arguments(1) == convolutions(1) == 2


@pytest.mark.parametrize("dimension", ["a_columns", "a_rows_b_columns", "b_rows"])
def test_a_product(dimension):
    a, b = RNG.normal(size=(2, 3, 4)), RNG.normal(size=(2, 4, 5))
    a, b = a.astype(np.float32), b.astype(np.float32)
    multiply = ipu.math_ops.serialized_matmul
    assert_close(multiply(a, b, 2, dimension), a @ b)
    at, bt = np.swapaxes(a, 1, 2), np.swapaxes(b, 1, 2)
    assert_close(multiply(at, bt, 2, dimension, True, True), a @ b)
    with pytest.raises(ValueError, match="serialization_dimension is one of"):
        multiply(a, b, 2, "rows")


def test_sums_of_segments_and_rows_of_a_table():
    data = np.float32([[1, 2], [3, 4], [5, 6]])
    sums = ipu.math_ops.segment_sum(data, np.int32([0, 0, 2]), 4)
    assert sums.tolist() == [[4, 6], [0, 0], [5, 6], [0, 0]]
    rows = ipu.embedding_ops.embedding_lookup(data, np.int32([[2], [0]]), serialization_factor=3)
    assert rows.tolist() == [[[5, 6]], [[1, 2]]]


def test_activations():
    x = RNG.normal(size=8).astype(np.float32) * 4
    nn = ipu.nn_ops
    assert_close(nn.gelu(x), jax.nn.gelu(x, approximate=True))
    assert_close(nn.gelu(x, approximate=False), jax.nn.gelu(x, approximate=False))
    assert_close(nn.swish(x), x / (1 + np.exp(-x)))
    assert_close(nn.softmax(x, stable=True), jax.nn.softmax(x))
    assert_close(nn.hard_sigmoid(x), np.clip(0.2 * x + 0.5, 0, 1))


def test_dropout_draws_anew_in_each_step_unless_it_has_a_seed():
    out = IPUOutfeedQueue()
    x = jnp.ones(64, jnp.float32)

    def body():
        drop = ipu.rand_ops.dropout
        return out.enqueue([drop(x, 0.25), drop(x, 0.25, seed=[1, 2]), drop(x, 0.5, [1])])

    program = ipu_compiler.compile(lambda: loops.repeat(2, body))
    program()
    free, seeded, whole = map(np.asarray, out.dequeue())
    assert set(np.unique(free)) == {np.float32(0), np.float32(1 / 0.75)}
    assert not np.array_equal(free[0], free[1])
    assert np.array_equal(seeded[0], seeded[1])
    assert all(len(np.unique(each)) == 1 for each in whole)
    with pytest.raises(ValueError, match="rate must be in the range"):
        ipu.rand_ops.dropout(x, 1.0)


def test_a_seed_begins_the_numbers_anew():
    program = ipu_compiler.compile(lambda: ipu.rand_ops.dropout(jnp.ones(32, jnp.float32)))

    def drawn(seed):
        ipu.utils.reset_ipu_seed(seed)
        return [np.asarray(program()[0]) for _ in range(2)]

    first, other, again = drawn(1), drawn(2), drawn(1)
    assert_bits_equal(first, again)
    assert not np.array_equal(first[0], first[1])
    assert not np.array_equal(first[0], other[0])
    with pytest.raises(TypeError, match="A seed is an integer"):
        ipu.utils.reset_ipu_seed("1")
    with pytest.raises(NotImplementedError, match="different numbers"):
        ipu.utils.reset_ipu_seed(1, experimental_identical_replicas=True)


def test_questions_and_what_is_noted(caplog):
    use([2, 1])
    assert ipu.utils.get_num_of_ipus_in_device("/device:IPU:0") == 2
    assert ipu.utils.get_num_of_ipus_in_device("/device:IPU:1") == 1
    assert not ipu.utils.running_on_ipu_model()
    assert not ipu.utils.use_synthetic_data_for("Infeed")
    ipu.utils.move_variable_initialization_to_cpu()
    assert "variables are made on the host" in caplog.text


@pytest.mark.parametrize(
    ("scope", "note"),
    [
        (lambda: ipu.scopes.ipu_jit_scope("a"), "a compiled function is one program"),
        (lambda: ipu.scopes.outside_compilation_scope(), "part of the program here"),
        (lambda: ipu.scopes.frontend_attribute("a", "b"), "for the original's compiler"),
        (lambda: ipu.scopes.stochastic_rounding(True), "changes nothing here"),
        (lambda: ipu.scopes.partials_type(np.float16), "changes nothing here"),
    ],
)
def test_scopes_without_effect(scope, note, caplog):
    def net():
        with scope():
            return jnp.float32(1) + 1

    assert run(net)[0] == 2
    assert note in caplog.text

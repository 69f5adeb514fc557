"""Convolutions inside loops: the values of one jit call a step, in the form the CPU library takes."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

import tailrace as tr
from covering import covering
from oracles import assert_bits_equal, assert_close
from tailrace.jaxprs import convolutions
from tailrace.jaxprs.convolutions import Kind, fast_form, library, swapped
from tailrace.program.compiling.compiled_programs import forget_programs

RNG = np.random.default_rng(0)

LAYOUTS = {
    "features last": ("N{}C", "{}IO", "N{}C"),
    "features first": ("NC{}", "OI{}", "NC{}"),
    "mixed": ("{}NC", "I{}O", "C{}N"),
}


def small_integers(shape, dtype):
    """Values whose products add up exactly in any order, so that every form has the same bits."""
    return jnp.asarray(np.random.default_rng(1).integers(-2, 3, shape), dtype)


def shaped(layout, spec, sizes):
    """A shape in the order of a specification, from sizes by letter."""
    return tuple(sizes[letter] for letter in LAYOUTS[layout][spec].format("012"[: sizes["dims"]]))


def convolution(
    dims=2,
    layout="features last",
    size=5,
    kernel=3,
    groups=1,
    inside=2,
    outside=2,
    stride=1,
    dilation=1,
    spread=1,
    padding=(1, 1),
    batch=2,
    dtype="float32",
):
    """A convolution as a function, and the shapes of its operands."""
    space = "012"[:dims]
    specs = tuple(spec.format(space) for spec in LAYOUTS[layout])
    sizes = {"dims": dims, "N": batch, "C": groups * inside}
    lhs = shaped(layout, 0, {**sizes, **dict.fromkeys(space, size)})
    weights = {"dims": dims, "I": inside, "O": groups * outside}
    rhs = shaped(layout, 1, {**weights, **dict.fromkeys(space, kernel)})

    def function(x, w):
        return lax.conv_general_dilated(
            x,
            w,
            (stride,) * dims,
            (padding,) * dims,
            (spread,) * dims,
            (dilation,) * dims,
            specs,
            groups,
        )

    return function, jax.ShapeDtypeStruct(lhs, dtype), jax.ShapeDtypeStruct(rhs, dtype)


def equations(function, x, w):
    """The equations of a convolution and of its two gradients."""
    out = jax.eval_shape(function, x, w)
    programs = [
        jax.make_jaxpr(function)(x, w),
        jax.make_jaxpr(lambda w, g: jax.linear_transpose(lambda x: function(x, w), x)(g))(w, out),
        jax.make_jaxpr(lambda x, g: jax.linear_transpose(lambda w: function(x, w), w)(g))(x, out),
    ]
    for program in programs:
        (eqn,) = [e for e in program.jaxpr.eqns if e.primitive.name == "conv_general_dilated"]
        yield eqn


def assert_same(eqn, values=small_integers):
    """The fast form has the values of the equation itself in a program's entry."""
    form = fast_form(eqn)
    operands = [values(v.aval.shape, v.aval.dtype) for v in eqn.invars]
    expected = jax.jit(lambda a, b: eqn.primitive.bind(a, b, **eqn.params))(*operands)
    if form is not None:
        zero = jnp.zeros((), expected.dtype)  # makes one zero of the two
        assert_bits_equal(jax.jit(form)(*operands) + zero, expected + zero)


KINDS = st.fixed_dictionaries(
    {
        "dims": st.integers(1, 3),
        "layout": st.sampled_from(sorted(LAYOUTS)),
        "size": st.integers(3, 6),
        "kernel": st.integers(1, 3),
        "groups": st.sampled_from([1, 1, 2, 4]),
        "inside": st.integers(1, 3),
        "outside": st.integers(1, 3),
        "stride": st.integers(1, 2),
        "dilation": st.integers(1, 2),
        "spread": st.integers(1, 2),
        "padding": st.tuples(st.integers(0, 2), st.integers(0, 2)),
        "dtype": st.sampled_from(["float32", "bfloat16", "float16"]),
    }
).filter(lambda kind: kind["size"] > (kind["kernel"] - 1) * kind["dilation"])


@settings(max_examples=12, deadline=None, derandomize=True)
@given(KINDS)
def test_random_convolutions_and_their_gradients(kind):
    for eqn in equations(*convolution(**kind)):
        assert_same(eqn)


@pytest.mark.exhaustive
@settings(max_examples=1000, deadline=None)
@given(KINDS)
def test_many_random_convolutions_and_their_gradients(kind):
    for eqn in equations(*convolution(**kind)):
        assert_same(eqn)


FORMS = [
    ("library", {}, {1, 2}),
    ("library", {"layout": "features first", "stride": 2, "groups": 2, "inside": 3}, {0, 1, 2}),
    ("library", {"size": 5, "spread": 2}, {1}),
    ("matmuls_by_output", {"size": 5, "spread": 2}, {2}),
    ("products_by_kernel", {"groups": 4, "inside": 1, "outside": 1}, {0, 1}),
    ("products_by_kernel", {"groups": 4, "inside": 2, "outside": 2}, {0}),
    ("products_by_output", {"groups": 4, "inside": 1, "outside": 2}, {2}),
    ("matmuls_by_kernel", {"dims": 3}, {0, 1}),
    ("matmuls_by_output", {"dims": 3}, {2}),
    ("matmuls_by_output", {"kernel": 1, "padding": (0, 0)}, {2}),
]


@pytest.mark.parametrize(("name", "kind", "which"), FORMS)
def test_forms_by_kind(name, kind, which):
    found = list(equations(*convolution(**kind)))
    for number in which:
        assert Kind.of(found[number]).fastest() is getattr(convolutions, name)
        assert_same(found[number])


@pytest.mark.parametrize(
    ("dtype", "dims", "padding", "layout"),
    covering(["float32", "bfloat16"], [1, 2, 3], [(1, 1), (0, 0), (1, 0), (0, 3)], sorted(LAYOUTS)),
)
def test_swapped_weight_gradients(dtype, dims, padding, layout):
    kind = {"layout": layout, "padding": padding, "inside": 3, "batch": 4, "kernel": 2}
    eqn = list(equations(*convolution(dims=dims, dtype=dtype, **kind)))[2]
    operands = [small_integers(v.aval.shape, v.aval.dtype) for v in eqn.invars]
    expected = eqn.primitive.bind(*operands, **eqn.params)
    found = swapped(Kind.of(eqn), *operands)
    assert found.dtype == expected.dtype
    assert_bits_equal(found + 0, expected + 0)


WIDE = {"layout": "features first", "inside": 256, "outside": 256, "size": 4, "batch": 1}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_large_weight_gradients_are_swapped(dtype):
    forward, to_input, to_weights = equations(*convolution(**WIDE, dtype=dtype))
    assert [Kind.of(eqn).fastest() for eqn in (forward, to_input)] == [library, library]
    assert Kind.of(to_weights).fastest() is swapped
    for eqn in (forward, to_input, to_weights):
        assert_same(eqn)


@pytest.mark.parametrize(
    "kind",
    [
        {"layout": "features last"},  # the result is in the library's order but for whole rows
        {"inside": 128},  # fits a core's cache
        {"stride": 2},
        {"dilation": 2, "padding": (2, 2)},
        {"groups": 2},
        {"padding": (0, 0)},  # swapped, it would sum over more
        {"padding": (3, 3)},  # swapped, it would have negative padding
    ],
)
def test_other_weight_gradients_are_not_swapped(kind):
    for eqn in equations(*convolution(**{**WIDE, **kind})):
        assert Kind.of(eqn).fastest() is not swapped


def normal(shape, dtype):
    return jnp.asarray(RNG.normal(size=shape), dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("stride", [1, 2])
def test_the_library_form_is_what_xla_makes_of_an_entry(dtype, layout, stride):
    shapes = convolution(layout=layout, stride=stride, size=12, inside=8, outside=8, dtype=dtype)
    for eqn in equations(*shapes):
        assert Kind.of(eqn).fastest() in (library, None)
        assert_same(eqn, normal)


@pytest.mark.parametrize("dtype", ["float64", "complex64", "int32"])
def test_other_dtypes_are_left_alone(dtype):
    with jax.enable_x64(True):
        function, x, w = convolution(layout="features first", dtype=dtype)
        (eqn,) = jax.make_jaxpr(function)(x, w).jaxpr.eqns
        assert fast_form(eqn) is None


# -- in programs ------------------------------------------------------------------------------------


def convolve(x, w, stride=1):
    return lax.conv_general_dilated(
        x, w, (stride, stride), "SAME", dimension_numbers=("NCHW", "OIHW", "NCHW")
    )


@jax.custom_vjp
def convolve_again(x, w):
    return convolve(x, w)


convolve_again.defvjp(
    lambda x, w: (convolve(x, w), (x, w)), lambda kept, g: jax.vjp(convolve, *kept)[1](g)
)

INSIDE = {
    "plain": convolve,
    "jit": jax.jit(convolve),
    "remat": jax.checkpoint(lambda x, w: jnp.tanh(convolve(x, w))),
    "scan": lambda x, w: lax.scan(lambda x, _: (jnp.tanh(convolve(x, w)), None), x, length=2)[0],
    "cond": lambda x, w: lax.cond(x.sum() > 0, lambda: convolve(x, w), lambda: -convolve(x, w)),
    "while": lambda x, w: lax.fori_loop(0, 2, lambda _, x: convolve(x, w), x),
    "custom_vjp": convolve_again,
    "jit of scan": jax.jit(
        lambda x, w: lax.scan(lambda x, _: (jnp.tanh(convolve(x, w)), None), x, length=2)[0]
    ),
}

IN_ORDER = re.compile(r"dim_labels=b(0?1?2?)f_\1io->b\1f")


@pytest.fixture
def compiled(monkeypatch):
    """The programs that XLA made in a test, as text."""
    forget_programs()  # an equal one of another test would not be compiled again
    texts = []
    plain = jax.stages.Lowered.compile

    def compile(self, *args, **kwargs):
        made = plain(self, *args, **kwargs)
        texts.append(made.as_text())
        return made

    monkeypatch.setattr(jax.stages.Lowered, "compile", compile)
    return texts


def convolutions_in(texts):
    return [line for text in texts for line in text.splitlines() if " convolution(" in line]


@pytest.mark.cpu
@pytest.mark.parametrize("inside", INSIDE)
def test_convolutions_in_programs_inside_equations(inside, compiled):
    def loss(w, x):
        if inside == "while":  # has no backward pass
            x = lax.stop_gradient(INSIDE[inside](x, lax.stop_gradient(w)))
        else:
            x = INSIDE[inside](x, w)
        return (convolve(x, w) ** 2).mean()

    weights = RNG.normal(size=(3, 3, 3, 3)).astype(np.float32) / 5
    elements = [(RNG.normal(size=(2, 3, 6, 6)).astype(np.float32),) for _ in range(4)]
    trainer = tr.Trainer(loss, optax.sgd(0.01), weights, steps_per_execution=4)
    history = trainer.fit(elements, steps=4)
    found = convolutions_in(compiled)
    assert found
    assert all(IN_ORDER.search(line) for line in found), found
    params, losses = plain_training(loss, optax.sgd(0.01), weights, elements)
    assert_close(history.loss, losses)
    assert_close(trainer.params, params)


def plain_training(loss, optimizer, params, elements):
    """One jit call a step."""

    @jax.jit
    def step(params, opt_state, batch):
        value, grads = jax.value_and_grad(loss)(params, *batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    opt_state, losses = optimizer.init(params), []
    for batch in elements:
        params, opt_state, value = step(params, opt_state, batch)
        losses.append(value)
    return params, np.asarray(losses)


def pooled(x):
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")


def normalised(x, scale):
    mean = x.mean((0, 1, 2))
    variance = ((x - mean) ** 2).mean((0, 1, 2))
    return (x - mean) * lax.rsqrt(variance + 1e-3) * scale


def convnet_loss(params, images, labels):
    """Two convolutions, each with normalisation and pooling, and a dense layer."""
    x = images
    for name in ("first", "second"):
        with jax.named_scope(name):
            x = lax.conv_general_dilated(
                x, params[name], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
        x = pooled(jax.nn.relu(normalised(x, params[f"{name}_scale"])))
    logits = x.reshape(x.shape[0], -1) @ params["out"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def convnet():
    shapes = {"first": (3, 3, 1, 4), "second": (3, 3, 4, 8), "out": (72, 10)}
    params = {
        name: (RNG.normal(size=shape) * 0.2).astype(np.float32) for name, shape in shapes.items()
    }
    params |= {"first_scale": np.ones(4, np.float32), "second_scale": np.ones(8, np.float32)}
    elements = [
        (
            RNG.normal(size=(4, 12, 12, 1)).astype(np.float32),
            RNG.integers(0, 10, 4).astype(np.int32),
        )
        for _ in range(5)
    ]
    return params, elements


@pytest.mark.cpu
@pytest.mark.parametrize("accumulation", [1, 5])
def test_a_convnet_trains_as_by_one_jit_call_a_step(accumulation, compiled, monkeypatch):
    # The devices chosen decide about forms and compiler options, not what JAX would prefer.
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    params, elements = convnet()
    trainer = tr.Trainer(convnet_loss, optax.sgd(0.1), params, accumulation=accumulation)
    trainer.fit(elements, steps=len(elements) // accumulation)
    found = convolutions_in(compiled)
    assert found
    assert all(IN_ORDER.search(line) for line in found), found
    if accumulation == 1:
        expected, _ = plain_training(convnet_loss, optax.sgd(0.1), params, elements)
    else:
        grads = [jax.jit(jax.grad(convnet_loss))(params, *batch) for batch in elements]
        expected = jax.tree.map(lambda p, *g: p - 0.1 * sum(g) / len(g), params, *grads)
    assert_close(trainer.params, expected)


def test_taps_on_convolutions_and_their_gradients_see_the_values_of_the_model():
    params, elements = convnet()
    names = ["activation/first", "activation/second", "grad/*"]
    trainer = tr.Trainer(
        convnet_loss, optax.sgd(0.1), params, observe=[tr.Tap(names, reduce="tensor")]
    )
    trainer.fit(elements[:1], steps=1)
    images, labels = elements[0]
    first = jax.jit(
        lambda x, w: lax.conv_general_dilated(
            x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
    )(images, params["first"])
    assert_bits_equal(trainer.records["activation/first"].values[0], np.asarray(first))
    grads = jax.jit(jax.grad(convnet_loss))(params, images, labels)
    for layer in ("first", "second"):
        assert_close(trainer.records[f"grad/{layer}"].values[0], np.asarray(grads[layer]))


@pytest.mark.parametrize("layout", ["features last", "features first"])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("padding", [(3, 1), (1, 4)])
def test_inputs_that_are_cropped_and_padded(layout, stride, padding):
    """JAX 0.10 alone has wrong gradients for some; the oracle pads its input with zeros itself."""
    specs = tuple(spec.format("01") for spec in LAYOUTS[layout])
    rng = np.random.default_rng(0)
    shape = shaped(layout, 0, {"dims": 2, "N": 2, "C": 3, "0": 6, "1": 6})
    kernels = [
        rng.normal(size=shaped(layout, 1, {"dims": 2, "I": 3, "O": 3, "0": 3, "1": 3})) * 0.3
        for _ in range(2)
    ]
    params = [kernel.astype(np.float32) for kernel in kernels]
    sides = [padding if letter in "01" else (0, 0) for letter in specs[0]]

    def by_padding(x, w):
        return lax.conv_general_dilated(x, w, (stride,) * 2, [padding] * 2, dimension_numbers=specs)

    def by_hand(x, w):
        wide = jnp.pad(x, sides)
        return lax.conv_general_dilated(wide, w, (stride,) * 2, "VALID", dimension_numbers=specs)

    def loss_of(last):
        def loss_fn(params, x):
            first = lax.conv_general_dilated(x, params[0], (1, 1), "SAME", dimension_numbers=specs)
            return (last(first, params[1]) ** 2).mean()

        return loss_fn

    data = [rng.normal(size=shape).astype(np.float32) for _ in range(3)]
    trainer = tr.Trainer(loss_of(by_padding), optax.sgd(0.1), params, steps_per_execution=3)
    trainer.fit(data, steps=3)
    for x in data:
        grads = jax.jit(jax.grad(loss_of(by_hand)))(params, x)
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
    assert_close(trainer.params, params)

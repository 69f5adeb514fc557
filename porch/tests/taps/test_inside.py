"""Activations and their gradients inside whatever JAX can put around them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tailrace as tr
from oracles import assert_close
from tailrace.errors import SelectionError

RNG = np.random.default_rng(0)
X = [RNG.normal(size=(2, 3)).astype(np.float32) for _ in range(3)]
STACK = RNG.normal(size=(4, 3, 3)).astype(np.float32) * 0.7
RATE = 0.1


def seen(loss, params, select="*", data=X, **options):
    """Train for one step per element; returns records of whole tensors."""
    trainer = tr.Trainer(
        loss,
        optax.sgd(RATE),
        params,
        steps_per_execution=len(data),
        observe=[tr.Tap(select, reduce="tensor")],
        **options,
    )
    trainer.fit([(x,) for x in data], steps=len(data))
    return trainer.records


def plain(perturbed, params, shift, data=X):
    """The same by hand: values and their gradients for each element, by name.

    `perturbed(params, shift, x)` returns the loss and the values, to each of which its part of
    `shift` (all zeros) was added.
    """
    params = jax.tree.map(jnp.asarray, params)
    shift = jax.tree.map(jnp.asarray, shift)
    step = jax.jit(jax.value_and_grad(perturbed, argnums=(0, 1), has_aux=True))
    found = {}
    for x in data:
        (_, values), (grads, cotangents) = step(params, shift, x)
        for kind, tree in (("activation", values), ("cotangent", cotangents)):
            for name, value in tree.items():
                found.setdefault(f"{kind}/{name}", []).append(np.asarray(value))
        params = jax.tree.map(lambda p, g: p - RATE * g, params, grads)
    return {name: np.stack(values) for name, values in found.items()}


def assert_seen(records, expected):
    for name, values in expected.items():
        assert_close(records[name].values, values)
        assert records[name].steps.tolist() == list(range(len(values)))


# -- layers -------------------------------------------------------------------------------------


def scoped_layer(h, w):
    with jax.named_scope("layer"):
        return jnp.tanh(h @ w)


def stack_by_hand(stack, shift, x):
    h, values = x, []
    for w, s in zip(stack, shift["layer"], strict=True):
        h = jnp.tanh(h @ w) + s
        values.append(h)
    return (h**2).mean(), {"layer": jnp.stack(values)}


NO_SHIFT = {"layer": np.zeros((4, 2, 3), np.float32)}


@pytest.mark.parametrize("around", ["plain", "remat", "jit", "remat_of_jit", "unrolled", "reverse"])
def test_a_scanned_stack_has_the_layers_in_front(around):
    body = {
        "remat": jax.checkpoint(scoped_layer),
        "jit": jax.jit(scoped_layer),
        "remat_of_jit": jax.checkpoint(jax.jit(scoped_layer)),
    }.get(around, scoped_layer)
    backwards = around == "reverse"
    unroll = 2 if around == "unrolled" else 1

    def loss(stack, x):
        h, _ = jax.lax.scan(
            lambda h, w: (body(h, w), None), x, stack, unroll=unroll, reverse=backwards
        )
        return (h**2).mean()

    params = STACK[::-1] if backwards else STACK
    records = seen(loss, params, ["activation/layer", "cotangent/layer"])
    expected = plain(stack_by_hand, STACK, NO_SHIFT)
    if backwards:
        expected = {name: values[:, ::-1] for name, values in expected.items()}
    assert_seen(records, expected)


@pytest.mark.parametrize("mode", ["all", "sum", "final"])
def test_statistics_of_a_scanned_stack_are_those_of_each_layer(mode):
    def loss(stack, x):
        h, _ = jax.lax.scan(lambda h, w: (scoped_layer(h, w), None), x, stack)
        return (h**2).mean()

    taps = [tr.Tap("activation/layer", mode=mode, reduce=how) for how in ("stats", "norm")]
    trainer = tr.Trainer(loss, optax.sgd(RATE), STACK, steps_per_execution=3, observe=taps)
    trainer.fit([(x,) for x in X], steps=3)
    values = plain(stack_by_hand, STACK, NO_SHIFT)["activation/layer"]
    values = {"all": values, "sum": values.sum(0)[None], "final": values[-1:]}[mode]
    found = trainer.records["activation/layer", "stats"].values
    assert found.shape == values.shape[:2]
    np.testing.assert_allclose(found["mean"], values.mean((2, 3)), 1e-4, 1e-6)
    np.testing.assert_allclose(found["max"], values.max((2, 3)), 1e-5)
    norms = np.sqrt((values**2).sum((2, 3)))
    np.testing.assert_allclose(trainer.records["activation/layer", "norm"].values, norms, 1e-5)


@pytest.mark.parametrize("around", ["plain", "remat", "jit", "vmap", "inner_jit"])
def test_layers_called_one_after_the_other_are_numbered(around):
    def layer(h, w):
        if around == "vmap":
            return jax.vmap(scoped_layer, (0, None))(h, w)
        if around == "remat":
            return jax.checkpoint(scoped_layer)(h, w)
        return scoped_layer(h, w)

    compiled = jax.jit(layer)

    def forward(stack, x):
        h = x
        for w in stack:
            h = (compiled if around == "inner_jit" else layer)(h, w)
        return (h**2).mean()

    loss = jax.jit(forward) if around == "jit" else forward
    records = seen(loss, list(STACK), ["activation/layer*", "cotangent/layer*"])
    expected = plain(stack_by_hand, list(STACK), NO_SHIFT)
    for kind in ("activation", "cotangent"):
        for number in range(4):
            name = f"{kind}/layer#{number}" if number else f"{kind}/layer"
            assert_close(records[name].values, expected[f"{kind}/layer"][:, number])


# -- names --------------------------------------------------------------------------------------


def test_nested_scopes_and_several_values_that_leave():
    def loss(w, x):
        with jax.named_scope("outer"):
            with jax.named_scope("inner"):
                a = x * w
                b = a + 1
            c = jnp.sin(a) * b
        return (c**2).mean()

    def by_hand(w, shift, x):
        a = x * w + shift["outer/inner[0]"]
        b = a + 1 + shift["outer/inner[1]"]
        c = jnp.sin(a) * b + shift["outer"]
        return (c**2).mean(), {"outer/inner[0]": a, "outer/inner[1]": b, "outer": c}

    zero = np.zeros((2, 3), np.float32)
    shift = {"outer/inner[0]": zero, "outer/inner[1]": zero, "outer": zero}
    records = seen(loss, np.float32(0.5))
    assert_seen(records, plain(by_hand, np.float32(0.5), shift))
    assert {"activation/outer:sin", "activation/outer:mul", "activation/outer/inner:mul"} <= set(
        records.names
    )
    assert_close(
        records["activation/outer/inner:mul"].values,
        records.get(("activation/outer/inner[0]", "tensor")).values,
    )


def test_a_value_used_twice_has_the_sum_of_its_gradients():
    def loss(w, x):
        with jax.named_scope("shared"):
            h = x * w
        return (jnp.sin(h) + h**2).mean()

    def by_hand(w, shift, x):
        h = x * w + shift["shared"]
        return (jnp.sin(h) + h**2).mean(), {"shared": h}

    shift = {"shared": np.zeros((2, 3), np.float32)}
    names = ["activation/shared", "cotangent/shared"]
    assert_seen(seen(loss, np.float32(2), names), plain(by_hand, np.float32(2), shift))


def test_operations_without_a_scope_and_integers():
    def loss(w, x):
        ranks = jnp.argsort(x, axis=-1)
        return (x * w * ranks.astype(jnp.float32)).mean()

    records = seen(loss, np.float32(2), "activation/*")
    ints = [name for name in records.names if records[name].values.dtype == np.int32]
    assert_close(records[ints[-1]].values, np.stack([np.argsort(x, -1) for x in X]).astype("i4"))
    assert "activation/:mul" in records


# -- derivatives of one's own -------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["custom_jvp", "custom_vjp"])
def test_functions_with_their_own_derivative_keep_it(kind):
    def plain_function(h):
        return jnp.clip(h, -0.5, 0.5)

    if kind == "custom_jvp":
        straight = jax.custom_jvp(plain_function)
        straight.defjvp(lambda p, t: (plain_function(*p), t[0]))
    else:
        straight = jax.custom_vjp(plain_function)
        straight.defvjp(lambda h: (plain_function(h), None), lambda _, ct: (ct,))

    def loss(w, x):
        with jax.named_scope("before"):
            h = x * w
        with jax.named_scope("clipped"):
            c = straight(h)
        return (c**2).mean() + c.sum()

    def by_hand(w, shift, x):
        h = x * w + shift["before"]
        c = straight(h) + shift["clipped"]
        return (c**2).mean() + c.sum(), {"before": h, "clipped": c}

    zero = np.zeros((2, 3), np.float32)
    records = seen(loss, np.float32(2))
    assert_seen(records, plain(by_hand, np.float32(2), {"before": zero, "clipped": zero}))
    assert "activation/clipped:plain_function" in records


# -- branches and loops -------------------------------------------------------------------------


def branching(w, x):
    def yes(h):
        with jax.named_scope("yes"):
            return h * w

    def no(h):
        with jax.named_scope("no"):
            return jnp.sin(h) * w

    return (jax.lax.cond(x.sum() > 0, yes, no, x) ** 2).mean()


def test_a_branch_is_recorded_when_it_ran():
    ran = [x.sum() > 0 for x in X]
    assert True in ran
    assert False in ran
    records = seen(branching, np.float32(2))
    for name, taken in (("yes", True), ("no", False)):
        steps = [t for t, r in enumerate(ran) if r == taken]
        for kind in ("activation", "cotangent"):
            assert records[f"{kind}/{name}"].steps.tolist() == steps
    w = np.float32(2)
    for t, x in enumerate(X):
        h = x * w if ran[t] else np.sin(x) * w
        record = records["activation/yes" if ran[t] else "activation/no"]
        cotangent = records["cotangent/yes" if ran[t] else "cotangent/no"]
        at = record.steps.tolist().index(t)
        assert_close(record.values[at], h)
        assert_close(cotangent.values[at], 2 * h / h.size)
        made = x if ran[t] else np.sin(x)
        w = w - np.float32(RATE) * (2 * h * made / h.size).sum()


@pytest.mark.parametrize("mode", ["sum", "final"])
def test_sum_and_final_of_a_branch_are_over_the_steps_in_which_it_ran(mode):
    data = [x if x.sum() > 0 else -x for x in X]
    data[-1] = -data[-1]  # the last step takes the other branch
    tap = tr.Tap("activation/yes", mode=mode, reduce="tensor")
    trainer = tr.Trainer(
        branching, optax.sgd(0.0), np.float32(2), steps_per_execution=3, observe=tap
    )
    trainer.fit([(x,) for x in data], steps=3)
    values = [x * 2 for x in data[:-1]]
    expected = sum(values) if mode == "sum" else values[-1]
    assert_close(trainer.records["activation/yes"].values, np.stack([expected]))


@pytest.mark.parametrize("mode", ["all", "sum", "final"])
def test_a_branch_inside_a_stack_tells_which_layers_took_it(mode):
    def layer(h, w):
        def yes(h):
            with jax.named_scope("yes"):
                return h * w

        return jax.lax.cond(w > 0, yes, lambda h: h, h), None

    def loss(stack, x):
        return (jax.lax.scan(layer, x, stack)[0] ** 2).mean()

    stack = np.float32([2, -1, 0.5])
    tap = tr.Tap("activation/yes", mode=mode, reduce="tensor")
    trainer = tr.Trainer(loss, optax.sgd(0.0), stack, steps_per_execution=1, observe=tap)
    trainer.fit([(x,) for x in X[:2]], steps=2)
    record = trainer.records["activation/yes"]
    assert_close(record.values, np.stack([[x * 2, 0 * x, x] for x in X[:2]]))
    assert record.ran.tolist() == [[True, False, True]] * 2


def test_a_loop_of_unknown_length_shows_its_last_pass():
    def loss(w, x):
        def body(state):
            count, h = state
            with jax.named_scope("halved"):
                return count + 1, h / 2

        _, h = jax.lax.while_loop(
            lambda s: jnp.abs(s[1]).max() > 0.3, body, (0, jax.lax.stop_gradient(x))
        )
        return (h * w).sum()

    records = seen(loss, np.float32(2), ["activation/halved*"])
    for t, x in enumerate(X):
        while np.abs(x).max() > 0.3:
            x = x / 2
        assert_close(records["activation/halved"].values[t], x)


def test_fori_loops_have_their_passes_in_front():
    def loss(w, x):
        def body(i, h):
            with jax.named_scope("turn"):
                return jnp.sin(h * w)

        return (jax.lax.fori_loop(0, 3, body, x) ** 2).mean()

    def by_hand(w, shift, x):
        h, values = x, []
        for s in shift["turn"]:
            h = jnp.sin(h * w) + s
            values.append(h)
        return (h**2).mean(), {"turn": jnp.stack(values)}

    shift = {"turn": np.zeros((3, 2, 3), np.float32)}
    records = seen(loss, np.float32(1.5), ["activation/turn", "cotangent/turn"])
    assert_seen(records, plain(by_hand, np.float32(1.5), shift))


# -- the rest of a step -------------------------------------------------------------------------


def test_model_state_is_seen_as_it_enters():
    def loss(w, state, x):
        mean = 0.5 * state["mean"] + 0.5 * x.mean()
        return ((x * w - mean) ** 2).mean(), ({"mean": mean}, None)

    records = seen(loss, np.float32(2), "buffer/*", model_state={"mean": np.float32(0)})
    mean, means = np.float32(0), []
    for x in X:
        means.append(mean)
        mean = np.float32(0.5) * mean + np.float32(0.5) * x.mean()
    assert_close(records["buffer/mean"].values, np.asarray(means))


def test_a_gradient_that_never_flows_is_an_error_that_says_why():
    def loss(w, x):
        with jax.named_scope("metric"):
            m = jnp.abs(x * w).mean()
        return ((x * w) ** 2).mean(), {"m": m}

    assert "activation/metric" in seen(loss, np.float32(2), "activation/metric")
    assert "cotangent/metric" not in seen(loss, np.float32(2), "*")
    with pytest.raises(SelectionError, match="'cotangent/metric' does not exist: no gradient of"):
        seen(loss, np.float32(2), "cotangent/metric")


def test_gradients_flow_through_stopped_values_nowhere():
    def loss(w, x):
        with jax.named_scope("target"):
            target = jax.lax.stop_gradient(x * w)
        return ((x * w - target - 1) ** 2).mean()

    records = seen(loss, np.float32(2), "*")
    assert "activation/target" in records
    assert "cotangent/target:mul" not in records


# -- functions of one's own ---------------------------------------------------------------------


def test_an_observed_step_with_a_gradient_inside():
    def step(w, x):
        def loss(w):
            with jax.named_scope("layer"):
                h = jnp.sin(x * w)
            return (h**2).mean()

        value, grad = jax.value_and_grad(loss)(w)
        return w - 0.1 * grad, value

    observed = tr.observe(step, [tr.Tap("*", reduce="tensor")])
    for number, x in enumerate(X):
        (after, value), records = observed(jnp.float32(2), x)
        assert records["output/0"].steps.tolist() == [number]
        assert_close(records["activation/layer"].values[0], np.sin(x * np.float32(2)))
        assert_close(records["input/1"].values[0], x)
        assert_close(records["output/0"].values[0], np.asarray(after))
        assert_close(records["output/1"].values[0], np.asarray(value))


def test_an_observed_function_lists_its_tensors_without_running():
    def f(tree):
        with jax.named_scope("twice"):
            return {"y": tree["x"] * 2}

    catalogue = tr.observe(f, []).tensors({"x": jax.ShapeDtypeStruct((3,), jnp.float32)})
    assert catalogue.names[:2] == ["input/0/x", "output/y"]
    assert catalogue["activation/twice"].shape == (3,)


def test_taps_in_a_compiled_program():
    infeed = tr.InfeedQueue(X)

    def body(w, x):
        with jax.named_scope("scaled"):
            y = x * w
        return w + y.mean()

    program = tr.compile(
        lambda w: tr.repeat(3, body, w, infeed=infeed),
        observe=[tr.Tap("activation/scaled", reduce="tensor")],
    )
    program(jnp.float32(1))
    record = program.records["activation/scaled"]
    assert record.steps.tolist() == [0, 1, 2]
    w = np.float32(1)
    for x, value in zip(X, record.values, strict=True):
        assert_close(value, x * w)
        w = w + (x * w).mean()


def test_a_while_loop_of_ours_records_each_of_its_passes():
    def body(h):
        with jax.named_scope("halved"):
            return h / 2

    program = tr.compile(
        lambda h: tr.while_loop(lambda h: h.max() > 1, body, h, maximum_iterations=10),
        observe=[tr.Tap("activation/halved"), tr.Tap("activation/halved", reduce="tensor")],
    )
    program(jnp.float32([16, 8]))
    whole = program.records["activation/halved", "tensor"]
    assert whole.values.tolist() == [[8, 4], [4, 2], [2, 1], [1, 0.5]]
    assert whole.steps.tolist() == [0, 1, 2, 3]
    stats = program.records["activation/halved", "stats"]
    assert stats.values["max"].tolist() == [8, 4, 2, 1]


def farthest(x):
    """A reduction by a function of its own, with as many operands as the reduction has."""
    return jax.lax.reduce(
        x, jnp.float32(0), lambda a, b: jnp.where(jnp.abs(a) > jnp.abs(b), a, b), (0, 1)
    )


def test_a_reduction_by_a_function_is_seen_from_outside():
    observed = tr.observe(lambda x: farthest(x) * 2, [tr.Tap("*", reduce="tensor")])
    output, records = observed(X[0])
    assert output == farthest(X[0]) * 2
    assert records["activation/:reduce"].values[0] == farthest(X[0])


def test_a_reduction_by_a_function_is_not_the_culprit():
    def loss(w, x):
        return jnp.log(w - 1) + farthest(jax.lax.stop_gradient(x)) * 0

    trainer = tr.Trainer(loss, optax.sgd(0.1), jnp.float32(0), observe=[tr.stop_on_nonfinite()])
    with pytest.raises(tr.errors.NonFiniteError, match="'log'"):
        trainer.fit([(x,) for x in X], steps=3)

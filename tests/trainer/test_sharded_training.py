"""Sharded models: the losses, the collectives and the places of the arrays are those of plain JAX."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from sharded_models import (
    MESHES,
    MODELS,
    STEPS,
    collectives,
    hand_written,
    layout,
    mesh_of,
    mlp,
    whole,
)

import tailrace as tr
from oracles import assert_bits_equal, assert_close

OPTIMIZER = optax.adam(1e-2)
PLAIN = {"boundaries": False, "convolutions": False}


@pytest.fixture(autouse=True)
def promoting():
    with jax.numpy_dtype_promotion("standard"):  # optax mixes dtypes
        yield


def trainer(model, optimizer=OPTIMIZER, **options):
    return tr.Trainer(model.loss, optimizer, model.params, model_state=model.state, **options)


def fit(trainer, model, batch=16, steps=STEPS):
    return trainer.fit(tr.batches(model.data, batch), steps=steps, progress=False).loss


@functools.cache
def on_one_device(name):
    model = MODELS[name]()
    return fit(trainer(model), model)


@functools.cache
def by_hand(name, mesh_name):
    """The losses and the collectives of the hand-written program."""
    model = MODELS[name]()
    mesh, shard = layout(model, mesh_name)
    specs = specs_of(trainer(model, mesh=mesh, shard=shard).params)
    axes = tuple(axis for axis in mesh.axis_names if axis != "model")
    gathered = whole if shard == "fsdp" else None
    losses, compiled = hand_written(model, OPTIMIZER, mesh, specs, axes, gathered)
    return losses, collectives(compiled)


def specs_of(tree):
    return jax.tree.map(lambda leaf: leaf.sharding.spec, tree)


def compiled_of(trainer):
    executables = trainer.engine.runner.executables.values()
    return next(one.compiled for one in executables if one.compiled is not None)


@pytest.mark.parametrize("mesh_name", MESHES)
@pytest.mark.parametrize("name", MODELS)
def test_a_sharded_model_trains_as_the_same_program_by_hand(name, mesh_name):
    model = MODELS[name]()
    mesh, shard = layout(model, mesh_name)
    sharded = trainer(model, mesh=mesh, shard=shard, rewrites=PLAIN)
    losses = fit(sharded, model)
    assert_close(losses, on_one_device(name))
    expected, sent = by_hand(name, mesh_name)
    assert_bits_equal(losses, expected)
    # In number and bytes: no gather of the optimizer's state, no activation that is moved more often.
    assert collectives(compiled_of(sharded)) == sent


def test_rewrites_send_nothing_more():
    model = MODELS["convnet"]()
    mesh, shard = layout(model, "data x model")
    sharded = trainer(model, mesh=mesh, shard=shard)
    assert_close(fit(sharded, model), on_one_device("convnet"))
    assert collectives(compiled_of(sharded)) == by_hand("convnet", "data x model")[1]


def test_a_device_holds_its_part_of_parameters_and_optimizer_state():
    model = MODELS["gpt"]()
    mesh, shard = layout(model, "fsdp")
    sharded = trainer(model, mesh=mesh, shard=shard)
    fit(sharded, model, steps=2)
    state = sharded.state
    moments = state.optimizer_state[0]
    assert specs_of(moments.mu) == specs_of(moments.nu) == specs_of(state.params)
    total = held = 0
    for leaf in jax.tree.leaves((state.params, moments.mu, moments.nu)):
        total += leaf.nbytes
        held += leaf.addressable_shards[0].data.nbytes
    assert held <= 1.05 * total / 8
    memory = compiled_of(sharded).memory_analysis()
    assert memory.alias_size_in_bytes <= 1.05 * total / 8 + 64  # what the loop overwrites


# -- where the mesh comes from ------------------------------------------------------------------


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_arrays_given_with_a_sharding_keep_it(kind):
    model = mlp()
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(kind, kind))
    shardings = {
        "in": {"w": NamedSharding(mesh, P(None, "model")), "b": NamedSharding(mesh, P())},
        "out": {"w": NamedSharding(mesh, P("model"))},
    }
    params = jax.device_put(model.params, shardings)
    sharded = tr.Trainer(model.loss, OPTIMIZER, params)
    assert_bits_equal(fit(sharded, model), by_hand("mlp", "data x model")[0])
    found = sharded.params
    assert jax.tree.map(lambda leaf: leaf.sharding, found) == shardings
    assert_bits_equal(params, model.params)  # the caller's arrays are as they were
    moments = sharded.state.optimizer_state[0].mu
    assert jax.tree.map(lambda leaf: leaf.sharding, moments) == shardings


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_the_mesh_around_a_trainer_is_its_mesh(kind):
    model = mlp()
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(kind, kind))
    with jax.set_mesh(mesh):
        sharded = trainer(model, shard=model.shard)
        losses = fit(sharded, model, steps=5)
        assert sharded.params["in"]["w"].sharding == NamedSharding(mesh, P(None, "model"))
    losses = np.concatenate(
        [
            losses,
            sharded.fit(
                tr.batches(tuple(a[80:] for a in model.data), 16), steps=5, progress=False
            ).loss,
        ]
    )
    assert_bits_equal(losses, by_hand("mlp", "data x model")[0])


def test_a_mesh_of_one_device_is_one_device():
    model = mlp()
    mesh = mesh_of((1, 1), ("data", "model"))
    with jax.set_mesh(mesh):
        assert_bits_equal(fit(trainer(model), model), on_one_device("mlp"))
    alone = trainer(model, mesh=mesh, shard=model.shard)
    assert_close(fit(alone, model), on_one_device("mlp"))


def test_rules_are_by_name_by_function_or_by_size():
    model = mlp()
    mesh = mesh_of((2, 4), ("fsdp", "model"))
    by_name = trainer(model, mesh=mesh, shard={"*/w": P("fsdp"), "in/*": P("model")}).params
    assert specs_of(by_name) == {"in": {"w": P("fsdp"), "b": P("model")}, "out": {"w": P("fsdp")}}

    def largest(name, shape):
        return P("model") if name == "in/b" and shape == (512,) else None

    by_function = trainer(model, mesh=mesh, shard=largest).params
    assert specs_of(by_function) == {"in": {"w": P(), "b": P("model")}, "out": {"w": P()}}
    by_size = trainer(model, mesh=mesh, shard="fsdp").params  # "in/b" is small
    assert specs_of(by_size) == {"in": {"w": P(None, "fsdp"), "b": P()}, "out": {"w": P("fsdp")}}


def test_a_model_of_one_array_has_the_name_params():
    mesh = mesh_of((8,), ("data",))
    w = np.ones((16, 4), np.float32)
    sharded = tr.Trainer(
        lambda w, x: ((x @ w) ** 2).mean(), OPTIMIZER, w, mesh=mesh, shard={"params": P("data")}
    )
    sharded.fit([np.ones((8, 16), np.float32)] * 2, progress=False)
    assert sharded.params.sharding.spec == P("data")
    assert sharded.state.optimizer_state[0].mu.sharding.spec == P("data")


# -- batches ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("axes", "parts"), [(None, 2), ("model", 4), (("data", "model"), 8), ((), 1)]
)
def test_batches_are_split_over_the_batch_axes(axes, parts):
    model, seen = mlp(), []

    def loss(params, x, y):
        jax.debug.inspect_array_sharding(x, callback=lambda s: seen.append(s.shard_shape(x.shape)))
        return model.loss(params, x, y)

    mesh = mesh_of((2, 4), ("data", "model"))
    sharded = tr.Trainer(loss, OPTIMIZER, model.params, mesh=mesh, batch_axes=axes)
    assert_close(fit(sharded, model), on_one_device("mlp"))
    assert set(seen) == {(16 // parts, 16)}


def test_scalars_of_an_element_are_on_every_device():
    def loss(w, batch):
        return ((batch["x"] @ w) ** 2).mean() * batch["scale"]

    elements = [{"x": np.ones((8, 4), np.float32), "scale": np.float32(n)} for n in range(4)]
    mesh = mesh_of((8,), ("data",))
    found = [
        tr.Trainer(loss, OPTIMIZER, np.ones(4, np.float32), mesh=where).fit(
            elements, progress=False
        )
        for where in (mesh, None)
    ]
    assert_close(found[0].loss, found[1].loss)


def test_arrays_of_the_dataset_may_be_resident():
    model = mlp()
    sharded = trainer(model, mesh=mesh_of((8,), ("data",)))
    engine = sharded.engine
    losses = []
    with tr.InfeedQueue(tr.batches(model.data, 16), resident=True) as queue:
        engine.use(queue)
        for _ in range(2):
            ticket = engine.dispatch(STEPS // 2)
            (taken,) = [x for x in jax.live_arrays() if x.shape == (STEPS // 2, 16, 16)][:1]
            assert taken.sharding.shard_shape(taken.shape) == (STEPS // 2, 2, 16)
            losses.append(engine.collect(ticket).losses.reshape(-1))
    assert_bits_equal(np.concatenate(losses), by_hand("mlp", "data")[0])


def test_random_keys_are_those_of_one_device():
    model = mlp()

    def loss(params, x, y):
        return model.loss(params, x * jax.random.bernoulli(tr.key(), 0.5, x.shape), y)

    mesh, shard = layout(model, "data x model")
    found = [
        fit(tr.Trainer(loss, OPTIMIZER, model.params, seed=5, **where), model)
        for where in ({}, {"mesh": mesh, "shard": shard})
    ]
    assert_close(*found)


def test_microbatches_accumulate():
    model = mlp()
    mesh, shard = layout(model, "fsdp")
    found = [
        fit(trainer(model, accumulation=2, **options), model, 8, 10)
        for options in ({}, {"mesh": mesh, "shard": shard})
    ]
    assert_close(found[1], found[0])


def test_accumulation_does_not_keep_the_whole_model():
    def loss(params, x):
        for w in params:
            x = jax.numpy.tanh(x @ w)
        return (x**2).mean()

    params = [np.full((128, 128), 0.01, np.float32)] * 4
    needed = []
    for count in (1, 4):
        sharded = tr.Trainer(
            loss,
            optax.sgd(0.1),
            params,
            mesh=mesh_of((8,), ("fsdp",)),
            shard="fsdp",
            accumulation=count,
        )
        sharded.fit([np.ones((16, 128), np.float32)] * count, progress=False)
        compiled = compiled_of(sharded)
        needed.append(compiled.memory_analysis().temp_size_in_bytes)
        assert collectives(compiled)["all-gather"] == 4
    assert needed[1] <= 1.1 * needed[0]


# -- inside the loss ----------------------------------------------------------------------------


def test_a_loss_may_say_where_its_values_are():
    model = mlp()
    mesh = mesh_of((2, 4), ("data", "model"))

    def constrained(params, x, y):
        hidden = jax.nn.relu(x @ params["in"]["w"] + params["in"]["b"])
        hidden = jax.lax.with_sharding_constraint(hidden, P("data", "model"))
        return ((hidden @ params["out"]["w"] - y) ** 2).mean()

    def mapped(params, x, y):
        def local(params, x, y):
            index = jax.lax.axis_index("data")
            return jax.lax.pmean(model.loss(params, x, y) + 0 * index, "data")

        specs = {"in_specs": (P(), P("data"), P("data")), "out_specs": P()}
        return jax.shard_map(local, **specs)(params, x, y)

    for loss in (constrained, mapped):
        sharded = tr.Trainer(loss, OPTIMIZER, model.params, mesh=mesh, shard=None)
        assert_close(fit(sharded, model), on_one_device("mlp"))


def test_arrays_that_a_loss_closes_over_may_be_on_the_mesh():
    model = mlp()
    mesh = mesh_of((8,), ("data",))
    teacher = jax.device_put(np.ones((16, 8), np.float32), NamedSharding(mesh, P("data")))
    plain = np.ones((16, 8), np.float32)
    found = []
    for where, matrix in ((mesh, teacher), (None, plain)):

        def loss(params, x, y, matrix=matrix):
            return model.loss(params, x, y) + ((x @ matrix) ** 2).mean()

        found.append(fit(tr.Trainer(loss, OPTIMIZER, model.params, mesh=where), model))
    assert_close(*found)


@pytest.mark.parametrize("closed", [False, True])
def test_losses_for_explicit_axes_are_refused(closed):
    model = mlp()
    mesh = jax.make_mesh((8,), ("data",))  # with explicit axes, as JAX makes it
    teacher = jax.device_put(np.ones((16, 16), np.float32), NamedSharding(mesh, P("data")))

    def loss(params, x, y):
        x = x @ teacher if closed else jax.reshard(x, P("data"))
        return model.loss(params, x, y)

    with pytest.raises(tr.errors.ProgramError, match="with_sharding_constraint"):
        fit(tr.Trainer(loss, OPTIMIZER, model.params, mesh=mesh), model)


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_mesh_in_the_loss_alone_is_refused(replicas):
    model = mlp()
    mesh = mesh_of((8,), ("data",))

    def loss(params, x, y):
        x = jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P("data")))
        return model.loss(params, x, y)

    with pytest.raises(tr.errors.ProgramError, match=r"tr.Trainer\(..., mesh=mesh\)"):
        fit(tr.Trainer(loss, OPTIMIZER, model.params, replicas=replicas), model, 16 // replicas)


# -- what does not fit --------------------------------------------------------------------------

WRONG = {
    "an axis that is not there": (
        {"shard": {"in/w": P("tensor")}},
        r"'in/w', of shape \[16, 512\], .*'tensor'.*Write one of 'data', 'model'",
    ),
    "a dim that does not divide": (
        {"shard": {"out/w": P(None, ("data", "model")), "in/w": P(None, None)}, "odd": True},
        r"'out/w', .* dim 1, of size 6, over 'data' \(2\) x 'model' \(4\)",
    ),
    "too many entries": ({"shard": {"in/b": P(None, "model")}}, "at most as many entries"),
    "an axis twice": ({"shard": {"in/w": P("model", "model")}}, "'model' twice"),
    "no spec": ({"shard": {"in/w": "model"}}, "'in/w': 'model'"),
    "a rule for nothing": ({"shard": {"middle/w": P()}}, "'middle/w', which is none of in/b, in/w"),
    "another word": ({"shard": "zero"}, "shard='zero'"),
    "no axis fsdp": ({"shard": "fsdp"}, r"a mesh of 'data' \(2\) x 'model' \(4\)"),
    "no batch axis": (
        {"mesh": ((8,), ("model",))},
        r"named data, replica, fsdp.*batch_axes='model', or batch_axes=\(\)",
    ),
    "batch axes that are not there": ({"batch_axes": "rows"}, "batch_axes='rows'"),
    "no mesh": ({"mesh": None, "shard": "fsdp"}, "there is none"),
    "another kind of mesh": ({"mesh": 8}, "mesh is a jax.sharding.Mesh"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_does_not_fit_is_refused_before_anything_is_compiled(case):
    options, match = WRONG[case]
    options = {"mesh": ((2, 4), ("data", "model")), **options}
    if isinstance(options["mesh"], tuple):
        options["mesh"] = mesh_of(*options["mesh"])
    params = mlp().params
    if options.pop("odd", False):
        params = {**params, "out": {"w": jnp.zeros((512, 6))}}
    with pytest.raises(tr.errors.OptionError, match=match):
        tr.Trainer(mlp().loss, OPTIMIZER, params, **options)


def test_batches_that_do_not_divide_are_refused():
    model = mlp()
    with pytest.raises(
        tr.errors.OptionError, match=r"element\[0\] of shape \[12, 16\].*batches of 16"
    ):
        fit(trainer(model, mesh=mesh_of((8,), ("data",))), model, 12)


def test_arrays_of_two_meshes_are_refused():
    model = mlp()
    other = NamedSharding(mesh_of((4, 2), ("data", "model")), P("data"))
    params = {**model.params, "out": {"w": jax.device_put(model.params["out"]["w"], other)}}
    with pytest.raises(tr.errors.OptionError, match="sharded over one mesh.*'out/w'"):
        tr.Trainer(model.loss, OPTIMIZER, params, mesh=mesh_of((2, 4), ("data", "model")))


def test_a_sharding_and_another_rule_are_refused():
    model = mlp()
    mesh = mesh_of((8,), ("data",))
    own = jax.device_put(model.params["out"]["w"], NamedSharding(mesh, P("data")))
    params = {**model.params, "out": {"w": own}}
    with pytest.raises(tr.errors.OptionError, match="keep the sharding.*'out/w'"):
        tr.Trainer(model.loss, OPTIMIZER, params, shard={"out/w": P(None, "data")})


# -- one device ---------------------------------------------------------------------------------


def test_device_chooses_the_device_of_a_model_that_is_not_sharded():
    model = mlp()
    there = jax.devices()[5]
    params = jax.device_put(model.params, there)
    chosen = tr.Trainer(model.loss, OPTIMIZER, params, device=there)
    assert_bits_equal(fit(chosen, model), on_one_device("mlp"))
    assert {leaf.device for leaf in jax.tree.leaves(chosen.state)} == {there}
    assert chosen.evaluate(tr.batches(model.data, 16))["loss"] > 0
    with pytest.raises(tr.errors.ProgramError, match="device="):
        tr.Trainer(model.loss, OPTIMIZER, params)


@pytest.mark.parametrize("options", [{"replicas": 2}, {"shard": "fsdp"}, {"device": 3}])
def test_device_is_of_one_copy_that_is_not_sharded(options):
    model = mlp()
    with pytest.raises(tr.errors.OptionError, match="device"):
        tr.Trainer(model.loss, OPTIMIZER, model.params, **{"device": jax.devices()[1], **options})

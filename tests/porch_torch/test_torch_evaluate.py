"""Graphs are evaluated: scopes, constants, random numbers, refusals, and operations that stay whole."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as functional
from lowered_samples import captured
from torch import nn

import tailrace.torch.lowerings  # noqa: F401 (registers all)
from oracles import assert_bits_equal, assert_close
from tailrace.errors import ProgramError, TailraceError
from tailrace.torch.calls.arrays import array_of
from tailrace.torch.lowerings.composites import ROUTES
from tailrace.torch.lowerings.evaluate import evaluate, module_path, source_line
from tailrace.torch.lowerings.random_numbers import drawing, next_key

KEY = jax.random.key(0)
attention = ROUTES[functional.scaled_dot_product_attention]
cross_entropy = ROUTES[functional.cross_entropy]
embedding = ROUTES[functional.embedding]
detach = ROUTES[torch.Tensor.detach]


def arrays_of(tensors):
    return [jnp.asarray(array_of(t)) for t in tensors]


def found_by(function, *tensors, key=KEY):
    graph = captured(lambda *t: (function(*t),), list(tensors))
    return evaluate(graph, arrays_of(tensors), key)[0]


def targets(graph):
    return {str(node.target) for node in graph.graph.nodes if node.op == "call_function"}


def assert_same(route, plain, *tensors):
    """Values and gradients of a route are those of PyTorch's function."""
    given = [t.clone().requires_grad_(t.is_floating_point()) for t in tensors]
    expected = plain(*given)
    expected.float().sin().sum().backward()
    graph = captured(lambda *t: (route(*t),), list(tensors))
    assert any(name.startswith("tailrace.") for name in targets(graph))
    arrays = arrays_of(tensors)
    places = [n for n, t in enumerate(tensors) if t.is_floating_point()]

    def total(some):
        values = list(arrays)
        for place, value in zip(places, some, strict=True):
            values[place] = value
        (found,) = evaluate(graph, values, KEY)
        return jnp.sin(found.astype(jnp.float32)).sum(), found

    slopes, found = jax.grad(total, has_aux=True)([arrays[place] for place in places])
    assert_close(found, array_of(expected))
    for slope, place in zip(slopes, places, strict=True):
        assert_close(slope, array_of(given[place].grad))


# -- operations that stay whole -------------------------------------------------------------------

MASKS = {
    "none": {},
    "causal": {"is_causal": True},
    "boolean": {"attn_mask": torch.tensor([[True, True, False], [True, False, True], [False] * 3])},
    "numbers": {"attn_mask": torch.tensor([[0.0, -1.0, 2.0]])},
    "scaled": {"scale": 0.3},
}


@pytest.mark.parametrize("name", MASKS)
def test_attention(name):
    q, k, v = torch.randn(2, 4, 3, 8), torch.randn(2, 4, 3, 8), torch.randn(2, 4, 3, 6)
    given = MASKS[name]
    assert_same(
        lambda q, k, v: attention(q, k, v, **given),
        lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, **given),
        *(q, k, v),
    )


def test_attention_shares_keys_among_heads():
    q, k, v = torch.randn(2, 4, 3, 8), torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 8)
    given = {"enable_gqa": True}
    assert_same(
        lambda q, k, v: attention(q, k, v, **given),
        lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, **given),
        *(q, k, v),
    )


@pytest.mark.parametrize("form", ["boolean", "numbers"])
def test_a_mask_that_is_known_to_be_causal_needs_no_mask(form):
    q, k, v = torch.randn(3, 1, 2, 6, 4)

    def masked(q, k, v):
        rows = torch.arange(q.shape[-2])
        mask = (rows[:, None] >= rows)[None, None]
        if form == "numbers":
            mask = torch.where(mask, 0.0, torch.finfo(torch.float32).min)
        return attention(q, k, v, mask)

    found = found_by(masked, q, k, v)
    assert_bits_equal(found, found_by(lambda q, k, v: attention(q, k, v, is_causal=True), q, k, v))


def test_a_known_mask_that_hides_nothing_is_none():
    q, k, v = torch.randn(3, 1, 2, 6, 4)
    found = found_by(lambda q, k, v: attention(q, k, v, torch.ones(6, 6, dtype=bool)), q, k, v)
    assert_bits_equal(found, found_by(attention, q, k, v))


def test_dropout_of_attention_is_drawn_anew_in_each():
    q, k, v = torch.randn(1, 2, 64, 4), torch.randn(1, 2, 64, 4), torch.ones(1, 2, 64, 4)

    def twice(q, k, v):
        return torch.stack([attention(q, k, v, dropout_p=0.25) for _ in range(2)])

    one, two = found_by(twice, q, k, v)
    assert not np.array_equal(one, two)
    # Shares sum to 1 on average, whatever is dropped.
    assert abs(float(one.mean()) - 1) < 0.05
    assert_bits_equal(found_by(twice, q, k, v), jnp.stack([one, two]))
    assert not np.array_equal(found_by(twice, q, k, v, key=jax.random.key(1))[0], one)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"reduction": "none"},
        {"reduction": "sum", "ignore_index": 1},
        {"weight": torch.tensor([1.0, 2.0, 0.5, 0.0])},
        {"label_smoothing": 0.1, "ignore_index": 2},
        {"label_smoothing": 0.1, "weight": torch.tensor([1.0, 2.0, 0.5, 0.0])},
    ],
    ids=str,
)
@pytest.mark.parametrize("shape", [(5, 4), (2, 4, 3), (4,)], ids=str)
def test_cross_entropy(shape, options):
    x = torch.randn(shape)
    target = torch.tensor([0, 1, 2, 3, 2, 1])[: x.numel() // 4]
    target = target.reshape((*shape[:1], *shape[2:]) if len(shape) > 1 else ())
    assert_same(
        lambda x: cross_entropy(x, target, **options),
        lambda x: functional.cross_entropy(x, target, **options),
        x,
    )


def test_a_class_out_of_range_is_nan_and_an_ignored_one_is_not():
    x = torch.randn(3, 4)
    for target, lost in (([0, 4, 1], True), ([0, -1, 1], True), ([0, -100, 1], False)):
        found = found_by(lambda x, t: cross_entropy(x, t), x, torch.tensor(target))
        assert np.isnan(found) == lost


def test_what_a_route_has_no_form_for_is_pytorchs():
    x = torch.randn(3, 4)
    shares = torch.rand(3, 4)
    graph = captured(lambda x: (cross_entropy(x, shares),), [x])
    assert not any(name.startswith("tailrace.") for name in targets(graph))
    found = evaluate(graph, arrays_of([x]), KEY)[0]
    assert_close(found, array_of(functional.cross_entropy(x, shares)))
    with pytest.raises(TailraceError, match=r"no max_norm here.*max_norm=1.0"):
        captured(lambda w: (embedding(torch.tensor([0]), w, max_norm=1.0),), [x])


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_autocast_reaches_what_stays_whole(device):
    q, k, v = torch.randn(3, 1, 2, 6, 4)
    x, target = torch.randn(3, 4, dtype=torch.bfloat16), torch.tensor([0, 1, 2])

    def cast(function):
        def run(*tensors):
            # As `torch.autocast` does, which refuses "cuda" where there is none.
            held = torch.get_autocast_dtype(device)
            torch.set_autocast_enabled(device, True)
            torch.set_autocast_dtype(device, torch.bfloat16)
            try:
                return function(*tensors)
            finally:
                torch.set_autocast_enabled(device, False)
                torch.set_autocast_dtype(device, held)

        return run

    assert found_by(cast(attention), q, k, v).dtype == jnp.bfloat16
    assert found_by(cast(cross_entropy), x, target).dtype == jnp.float32


def test_detach_stops_the_gradient():
    graph = captured(lambda x: (x * detach(x),), [torch.randn(3)])
    slope = jax.grad(lambda x: evaluate(graph, [x], KEY)[0].sum())(jnp.arange(3.0))
    assert_bits_equal(slope, jnp.arange(3.0))


# -- evaluation -----------------------------------------------------------------------------------


class Part(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.LayerNorm(4)

    def forward(self, x):
        return torch.tanh(self.inner(x))


class Whole(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Part(), Part()])
        self.names = nn.ModuleDict({"last": Part()})

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return torch.relu(self.names["last"](x))


def dynamo_graph(module, x):
    """The ATen graph of a module, by PyTorch's front end."""
    found = []

    def backend(graph, inputs):
        def keep(aten, _):
            found.append(aten)
            return aten.forward

        with torch.no_grad():
            return torch._functorch.aot_autograd.aot_module_simplified(
                graph, inputs, fw_compiler=keep
            )

    with torch.no_grad():
        torch.compile(module, backend=backend, fullgraph=True)(x)
    return found[0]


@pytest.mark.filterwarnings("ignore")
def test_operations_have_the_scopes_of_their_modules():
    graph = dynamo_graph(Whole(), torch.randn(2, 4))
    shapes = [node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder"]
    inputs = [jnp.zeros(shape.shape) for shape in shapes]
    jaxpr = jax.make_jaxpr(lambda *values: evaluate(graph, values, KEY))(*inputs)
    scopes = {str(eqn.source_info.name_stack) for eqn in jaxpr.eqns}
    assert {
        "layers.0/layers.0.inner",
        "layers.0",
        "layers.1",
        "names.last/names.last.inner",
        "",
    } <= scopes


@pytest.mark.parametrize(
    ("written", "path"),
    [
        ("L['self'].layers.0.attn", "layers.0.attn"),
        ("L['module']", ""),
        ("L['self']._modules['layers']._modules['0']", "layers.0"),
        ("L['self'].layers[1].norm@2", "layers.1.norm"),
    ],
)
def test_paths_are_those_of_named_modules(written, path):
    graph = torch.fx.Graph()
    node = graph.placeholder("x")
    node.meta["nn_module_stack"] = {"1": ("L['self']", nn.Module), "2": (written, nn.Module)}
    assert module_path(node) == path


def test_a_missing_lowering_names_operation_module_and_line():
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    node = graph.call_function(torch.ops.aten.nonzero.default, (x,))
    node.meta["nn_module_stack"] = {"1": ("L['self'].encoder", nn.Module)}
    node.meta["stack_trace"] = (
        '  File "model.py", line 3, in forward\n    y = x.nonzero()\n        ^^^^^^^^'
    )
    graph.output((node,))
    assert source_line(node) == "y = x.nonzero()"
    with pytest.raises(ProgramError) as caught:
        evaluate(torch.fx.GraphModule({}, graph), [jnp.ones(3)], KEY)
    assert str(caught.value) == (
        "aten.nonzero.default has no form that runs on the device: how many entries it returns "
        "would depend on values (called in module 'encoder', by `y = x.nonzero()`). Compute it by "
        "other operations, or outside of the module."
    )


def test_a_lowering_that_refuses_says_where():
    graph = torch.fx.Graph()
    x, mask = graph.placeholder("x"), graph.placeholder("mask")
    node = graph.call_function(torch.ops.aten.index.Tensor, (x, [mask]))
    node.meta["stack_trace"] = "    y = x[mask]"
    graph.output((node,))
    module = torch.fx.GraphModule({}, graph)
    with pytest.raises(ProgramError, match=r"no mask on the device.*called by `y = x\[mask\]`"):
        evaluate(module, [jnp.ones(3), jnp.ones(3, bool)], KEY)


def test_what_depends_on_no_input_is_known():
    table = torch.randn(8, dtype=torch.bfloat16)

    def function(x):
        return x + torch.arange(8).cumsum(0) * table

    x = torch.randn(8)
    graph = captured(lambda x: (function(x),), [x])
    jaxpr = jax.make_jaxpr(lambda x: evaluate(graph, [x], KEY))(jnp.asarray(array_of(x)))
    assert "cumsum" not in str(jaxpr)
    assert_close(found_by(function, x), array_of(function(x)))


def test_random_operations_draw_from_keys_of_their_own():
    def function(x):
        return torch.stack([functional.dropout(x, 0.5), functional.dropout(x, 0.5), torch.rand(64)])

    x = torch.ones(64)
    one, two, three = found_by(function, x)
    assert not np.array_equal(one, two)
    assert set(np.unique(one)) == {0.0, 2.0}
    assert 0 <= three.min() <= three.max() < 1
    assert_bits_equal(found_by(function, x)[0], one)
    assert not np.array_equal(found_by(function, x, key=jax.random.key(1))[2], three)
    with drawing(KEY):
        assert next_key() != next_key()
    with pytest.raises(ProgramError, match=r"needs a key to draw from. Received: none"):
        next_key()

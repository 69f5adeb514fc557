"""`trainer.profile`: what costs most comes first, everything has a place, nothing is changed."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tailrace as tr
from tailrace.cli import main
from tailrace.profiling.profile.profile import Profile, Row
from tailrace.profiling.programs.device_operations import Operation
from tailrace.profiling.programs.hlo_costs import bytes_moved, flops
from tailrace.profiling.programs.hlo_text import parse
from tailrace.profiling.programs.named_operations import programs_of, resolved
from tailrace.profiling.programs.op_names import place_of

ROWS, STEPS = 32, 6
WIDE = 512  # its products take far longer than a busy machine stops any other operation for


def loss_fn(params, x, y):
    h = x
    for name in ("first", "second"):
        with jax.named_scope(name):
            h = jnp.tanh(h @ params[name])
    with jax.named_scope("planted"):
        wide = h @ params["wide"]
        for _ in range(3):
            wide = jnp.tanh(wide @ params["planted"])
    with jax.named_scope("head"):
        return ((wide.mean(axis=1) - y) ** 2).mean()


def params():
    rng = np.random.default_rng(0)
    sizes = {"first": (16, 16), "second": (16, 16), "wide": (16, WIDE), "planted": (WIDE, WIDE)}
    return {n: rng.normal(size=s).astype(np.float32) * 0.05 for n, s in sizes.items()}


def arrays():
    rng = np.random.default_rng(1)
    x = rng.normal(size=(256, 16)).astype(np.float32)
    return x, x[:, 0].copy()


def data(**options):
    return tr.batches(arrays(), ROWS, repeat=True, **options)


def trainer(**options):
    options = {"accumulation": 2, "observe": ["grad/*"], "steps_per_execution": STEPS, **options}
    return tr.Trainer(loss_fn, optax.sgd(1e-3, momentum=0.9), params(), **options)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("runs") / "run"


@pytest.fixture(scope="module")
def made(run_dir):
    one = trainer(run_dir=run_dir)
    before = one.fit(data(), steps=STEPS, progress=False).loss
    state = jax.tree.map(np.asarray, one.state)
    profile = one.profile(data())
    return one, profile, state, before


def test_a_planted_slow_layer_comes_first(made):
    _, profile, _, _ = made
    assert profile.rows[0].scope == "planted"
    assert [row.seconds for row in profile.rows] == sorted(
        (row.seconds for row in profile.rows), reverse=True
    )
    first = str(profile).splitlines()[2]
    assert re.match(r"(forward|backward)\s+planted", first), first


def test_every_phase_has_its_time_and_almost_everything_a_place(made):
    _, profile, _, _ = made
    assert profile.named >= 0.95
    assert profile.steps == 2 * STEPS
    for phase in ("forward", "backward", "optimizer", "accumulation", "feeds", "taps"):
        assert profile.phase(phase) > 0, phase
    scopes = {row.scope for row in profile.rows if row.phase == "forward"}
    assert {"first", "second", "planted", "head"} <= scopes


def test_floating_point_operations_are_those_of_the_products(made):
    _, profile, _, _ = made
    passes = profile.steps * 2
    products = 2 * ROWS * (16 * WIDE + 3 * WIDE * WIDE) * passes
    (forward,) = (r for r in profile.rows if (r.phase, r.scope) == ("forward", "planted"))
    (backward,) = (r for r in profile.rows if (r.phase, r.scope) == ("backward", "planted"))
    # Beside the products there are a tanh and its derivative for each value.
    assert products <= forward.flops <= 1.1 * products
    assert 1.9 * products <= backward.flops <= 2.2 * products
    assert forward.bytes > 0
    assert all(row.roofline is None or 0 < row.roofline <= 1 for row in profile.rows)


def test_the_trainer_is_as_before(made):
    one, _, state, before = made
    assert one.step == STEPS
    assert one.executions == 1
    np.testing.assert_array_equal(one.history.loss, before)
    jax.tree.map(np.testing.assert_array_equal, state, jax.tree.map(np.asarray, one.state))


def test_what_is_trained_after_a_profile_is_the_same():
    def elements():
        x, y = arrays()
        for number in range(8 * STEPS):
            rows = (np.arange(ROWS) * (number + 3)) % len(x)
            yield x[rows], y[rows]

    plain = trainer().fit(elements(), steps=2 * STEPS, progress=False).loss
    one, stream = trainer(), elements()
    one.profile(stream, executions=1)
    loss = one.fit(stream, steps=2 * STEPS, progress=False).loss
    np.testing.assert_array_equal(loss, plain)


def test_memory_has_owners(made):
    _, profile, _, _ = made
    sizes = sum(a.nbytes for a in params().values())
    assert profile.memory["parameters"] == sizes
    assert profile.memory["optimizer state"] == sizes
    # One row for each step that an execution may have: losses, and seven statistics of four gradients.
    assert profile.memory["records"] >= STEPS * 4 * (1 + 7 * 4)
    assert list(profile.memory.values()) == sorted(profile.memory.values(), reverse=True)


def test_a_loop_overwrites_its_state():
    weights = {f"w{number}": np.ones((64, 64), np.float32) for number in range(3)}

    def loss(w, x):
        for each in w.values():
            x = jnp.tanh(x @ each)
        return x.mean()

    optimizer, batch = optax.sgd(0.01, momentum=0.9), np.ones((2, 64), np.float32)
    one = tr.Trainer(loss, optimizer, weights, steps_per_execution=2)
    found = one.profile([batch] * 40, executions=1).memory
    assert sum(found.values()) <= 1.2 * one.explain(batch).peak_bytes, found


def test_it_is_kept_with_the_run_and_reported(made, run_dir, capsys):
    _, profile, _, _ = made
    assert Profile.load(run_dir / "profile.json") == profile
    assert main(["report", str(run_dir)]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert set(str(profile).splitlines()) <= {line.rstrip() for line in printed}, "rows are whole"
    report = (run_dir / "report.html").read_text()
    assert "planted" in report
    assert "time a step" in report


def test_a_profile_before_the_first_fit_is_kept_too(tmp_path):
    one = trainer(run_dir=tmp_path / "run", observe=())
    profile = one.profile(data(), executions=1)
    assert not (tmp_path / "run").exists()
    one.fit(data(), steps=STEPS, progress=False)
    assert Profile.load(tmp_path / "run" / "profile.json") == profile


def test_text_tree_html_picture_and_json(made):
    _, profile, _, _ = made
    assert Profile.from_json(profile.to_json()) == profile
    tree = profile.tree().splitlines()
    assert tree[0].split()[-1] in ("backward", "forward")
    assert any(line.endswith("    planted") for line in tree)
    assert "<svg" in profile.treemap()
    assert "planted" in profile.treemap()
    assert "<table>" in profile._repr_html_()
    with pytest.raises(tr.TailraceError, match="A profile is what trainer.profile"):
        Profile.from_json('{"format": 99}')


def test_names_are_text():
    row = Row("forward", "<script>alert(1)</script>", 1.0, 0.0, 0.0, None, 1, {})
    profile = Profile((row,), 1, 1, 1.0, 1.0, "cpu", 1.0, 1.0, {"<b>": 1})
    for text in (profile._repr_html_(), str(profile.treemap())):
        assert "<script>" not in text
        assert "<b>" not in text


def test_wrong_counts(made):
    with pytest.raises(tr.TailraceError, match="executions must be a whole number >= 1"):
        made[0].profile(data(), executions=0)


# -- names and costs from the text of a program -----------------------------------------------------


@pytest.mark.parametrize(
    ("op_name", "place"),
    [
        ("jit(f)/while/body/closed_call/jvp(a)/b/dot_general", ("forward", "a/b", "dot_general")),
        ("jit(f)/transpose(jvp(a))/b/dot_general", ("backward", "a/b", "dot_general")),
        ("jit(f)/jvp()/reduce_sum", ("forward", "", "reduce_sum")),
        ("jit(f)/while/body/optimizer/mul", ("optimizer", "", "mul")),
        ("jit(f)/jvp(optimizer)/mul", ("forward", "optimizer", "mul")),
        ("jit(f)/while/body/tailrace.taps/reduce_sum", ("taps", "", "reduce_sum")),
        ("jit(f)/while/body/dynamic_slice", ("feeds", "", "dynamic_slice")),
        ("jit(f)/while/body/add", ("loop", "", "add")),
        ("jit(f)/jvp(blocks.0)/blocks.0.attn/exp", ("forward", "blocks.0.attn", "exp")),
        ("jit(f)/jvp(a)/jit(relu)/max", ("forward", "a", "max")),
        (
            "jit(f)/transpose(jvp(a))/checkpoint/rematted_computation/b/sin",
            ("backward", "a/b", "sin"),
        ),
        ("", ("loop", "", "")),
    ],
)
def test_phase_and_scope_of_an_op_name(op_name, place):
    assert tuple(place_of(op_name)[:3]) == place


def test_costs_of_instructions():
    module = parse(
        jax.jit(lambda a, b: jnp.tanh(a @ b))
        .lower(jnp.ones((8, 32)), jnp.ones((32, 4)))
        .compile()
        .as_text()
    )
    entry = [module.instructions[one.name] for one in module.computations[module.entry]]
    total = sum(flops(one, module) for one in entry)
    assert total == 2 * 8 * 32 * 4 + 8 * 4
    assert sum(bytes_moved(one, module) for one in entry) >= 4 * (8 * 32 + 32 * 4 + 8 * 4)


LIBRARIES = """HloModule jit_f

ENTRY %main (a: f32[4,8,32], b: f32[4,32,16], x: f32[2,8,8,3], k: f32[3,3,3,6], y: f32[2,8,8,6], q: bf16[2,4,64,16]) -> f32[] {
  %a = f32[4,8,32]{2,1,0} parameter(0)
  %b = f32[4,32,16]{2,1,0} parameter(1)
  %x = f32[2,8,8,3]{3,2,1,0} parameter(2)
  %k = f32[3,3,3,6]{3,2,1,0} parameter(3)
  %y = f32[2,8,8,6]{3,2,1,0} parameter(4)
  %q = bf16[2,4,64,16]{3,2,1,0} parameter(5)
  %gemm = (f32[4,8,16]{2,1,0}, s8[4194304]{0}) custom-call(%a, %b), custom_call_target="__cublas$gemm", backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["2"],"rhs_contracting_dimensions":["1"],"lhs_batch_dimensions":["0"]}}}
  %conv = (f32[2,8,8,6]{3,2,1,0}, u8[1000000]{0}) custom-call(%x, %k), window={size=3x3 pad=1_1x1_1}, dim_labels=b01f_01io->b01f, custom_call_target="__cudnn$convForward"
  %filter = (f32[3,3,3,6]{3,2,1,0}, u8[0]{0}) custom-call(%x, %y), window={size=3x3 pad=1_1x1_1}, dim_labels=b01f_01io->b01f, custom_call_target="__cudnn$convBackwardFilter"
  %input = (f32[2,8,8,3]{3,2,1,0}, u8[0]{0}) custom-call(%y, %k), window={size=3x3 pad=1_1x1_1}, dim_labels=b01f_01io->b01f, custom_call_target="__cudnn$convBackwardInput"
  %attention = (bf16[2,4,64,16]{3,2,1,0}, u8[0]{0}) custom-call(%q, %q, %q), custom_call_target="__cudnn$fmhaSoftmax"
  ROOT %c = f32[] constant(0)
}
"""  # noqa: E501


def test_costs_of_what_libraries_compute():
    """Products, convolutions with their gradients, attention; the room they work in is no result."""
    module = parse(LIBRARIES)
    found = {name: flops(one, module) for name, one in module.instructions.items()}
    assert found["gemm"] == 2 * 4 * 8 * 32 * 16
    products = 2 * (2 * 8 * 8 * 6) * (3 * 3 * 3)
    assert found["conv"] == found["filter"] == found["input"] == products
    assert found["attention"] == 2 * 2 * (2 * 4 * 64 * 64 * 16)


def test_replicas_have_a_phase_of_their_own():
    profile = trainer(replicas=2, accumulation=1, observe=()).profile(data(), executions=1)
    assert profile.phase("replicas") > 0
    assert profile.named >= 0.95


GRAPHS = """HloModule jit_f

ENTRY %main (a: f32[8]) -> f32[8] {
  %a = f32[8]{0} parameter(0)
  %loop_add_fusion.3 = f32[8]{0} negate(f32[8]{0} %a), metadata={op_name="jit(f)/jvp(head)/neg"}
  ROOT %tanh.1 = f32[8]{0} tanh(%loop_add_fusion.3), metadata={op_name="jit(f)/jvp(head)/tanh"}
}
"""


def test_kernels_of_a_graph_have_the_names_of_instructions():
    """A GPU's profiler names the graph; the kernels in it have names of instructions or a library's."""

    class Compiled:
        def as_text(self):
            return GRAPHS

    def ran(name, in_graph=True):
        return Operation(0, "stream", name, "jit_f", 7, 1, 0, 5, in_graph)

    operations = [ran("tanh.1", in_graph=False), ran("loop_add_fusion_3"), ran("nvjet_tst_64x8")]
    programs = programs_of(operations, [Compiled()])
    found = resolved(operations, programs)
    assert [one.name for one in found] == ["tanh.1", "loop_add_fusion.3", "nvjet_tst_64x8"]
    assert [programs[7].place(one.name) is not None for one in found] == [True, True, False]


@pytest.mark.cpu
def test_memory_of_a_pipeline_by_owner():
    """Not `loop`: its buffers hold parameters, optimizer state and the stash of its stages."""
    params = [np.full((64, 256), 0.01, np.float32), np.full((256, 64), 0.01, np.float32)]
    stages = [lambda w, x: jnp.tanh(x @ w), lambda w, h: h @ w]
    pipeline = tr.Pipeline(stages, lambda y: (y**2).mean(), accumulation=4)
    trainer = tr.Trainer(pipeline, optax.sgd(0.1, momentum=0.9), params, steps_per_execution=2)
    data = tr.batches(np.ones((64, 64), np.float32), 8, repeat=True)
    memory = trainer.profile(data, executions=1).memory
    # On one of the two devices.
    assert memory["parameters"] == params[0].nbytes
    assert memory["optimizer state"] == params[0].nbytes
    assert memory["elements"] == 2 * 4 * 8 * 64 * 4
    # The residuals of at least the two microbatches in flight on the first stage.
    assert memory["stash"] >= 2 * 8 * 256 * 4

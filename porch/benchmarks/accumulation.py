"""Eight microbatches a step, host-fed: `tr.Trainer`, a nested scan by hand, and what else there is.

    python -m benchmarks.accumulation [--steps N] [--repeats N] [--only PART,...] [--no-peers]

The classifier 784-128-10 with Adam, microbatches of 32, all losses on the host at the end. Time is
compared by the ratio of neighbouring runs; peak bytes are those of the compiled program (arguments,
results and temporaries, as XLA counts them) for 10 steps with their elements.
"""

import os
import sys
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "jax")

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks import report, workload
from benchmarks.report import Contender
from benchmarks.workload import BATCH, HostBatches, loss_fn

COUNT = 8  # microbatches in a step
STEPS = 10  # in a dispatch, where the program chooses
RATE = 1e-3
LIMIT = "hand-written nested scan"


def main(arguments: list[str] | None = None) -> None:
    parser = report.common_flags(__doc__, steps=1000, repeats=7)
    flags = parser.parse_args(arguments)
    batches = HostBatches(flags.steps * COUNT)
    contenders, bytes_of, skipped = assemble(batches, peers=not flags.no_peers)
    contenders = report.chosen(contenders, flags.only, LIMIT)
    agreement = check_losses(contenders)
    report.measure(contenders, flags.repeats)
    baseline = next(c for c in contenders if c.name == LIMIT)
    table = report.timing_table(contenders, baseline, flags.steps, "step")
    rows = [(name, f"{size / 1e6:.2f}") for name, size in bytes_of.items()]
    memory = report.markdown_table((f"compiled for {STEPS} steps", "peak MB"), rows)
    parts = [table, agreement, memory, *(f"- not measured: {text}" for text in skipped)]
    command = " ".join(["python -m benchmarks.accumulation", *(arguments or sys.argv[1:])])
    title = f"Accumulation: {flags.steps:,} steps of {COUNT} microbatches of {BATCH}, Adam"
    report.publish(title, command, parts, path=None if flags.no_record else report.RESULTS)


def assemble(
    batches: HostBatches, *, peers: bool
) -> tuple[list[Contender], dict[str, int], list[str]]:
    """The contenders, the peak bytes of those whose program can be asked, and who is missing."""
    made = [nested_scan(batches), trainer(batches), multi_steps(batches)]
    contenders = [contender for contender, _ in made]
    bytes_of = {contender.name: peak for contender, peak in made}
    skipped = []
    if peers:
        try:
            contenders.append(keras_fit(batches))
        except ImportError as error:
            skipped.append(f"keras ({error})")
    return contenders, bytes_of, skipped


def start(optimizer: Any) -> tuple[Any, Any]:
    params = workload.init_params()
    return params, optimizer.init(params)


def nested_scan(batches: HostBatches) -> tuple[Contender, int]:
    optimizer = optax.adam(RATE)

    def step(state: Any, *elements: Any) -> tuple[Any, Any]:
        params, optimizer_state = state

        def one(accumulated: Any, element: Any) -> tuple[Any, Any]:
            loss, grads = jax.value_and_grad(loss_fn)(params, *element)
            return jax.tree.map(lambda a, g: a + g / COUNT, accumulated, grads), loss

        zeros = jax.tree.map(jnp.zeros_like, params)
        grads, losses = jax.lax.scan(one, zeros, elements)
        updates, optimizer_state = optimizer.update(grads, optimizer_state, params)
        return (optax.apply_updates(params, updates), optimizer_state), losses

    def grouped(state: Any, elements: Any) -> tuple[Any, Any]:
        elements = [leaf.reshape(-1, COUNT, *leaf.shape[1:]) for leaf in elements]
        return jax.lax.scan(lambda s, element: step(s, *element), state, elements)

    compiled = jax.jit(grouped, donate_argnums=0)
    run = workload.chunked(compiled, STEPS * COUNT)
    contender = Contender(LIMIT, lambda: _by_step(run(start(optimizer), batches)))
    return contender, _peak_bytes(compiled, start(optimizer), batches)


def multi_steps(batches: HostBatches) -> tuple[Contender, int]:
    optimizer = optax.MultiSteps(optax.adam(RATE), COUNT)

    def step(state: Any, *element: Any) -> tuple[Any, Any]:
        params, optimizer_state = state
        loss, grads = jax.value_and_grad(loss_fn)(params, *element)
        updates, optimizer_state = optimizer.update(grads, optimizer_state, params)
        return (optax.apply_updates(params, updates), optimizer_state), loss

    compiled = workload.scan(step)
    run = workload.chunked(compiled, STEPS * COUNT)
    contender = Contender(
        "optax.MultiSteps in a scan", lambda: _by_step(run(start(optimizer), batches))
    )
    return contender, _peak_bytes(compiled, start(optimizer), batches)


def trainer(batches: HostBatches) -> tuple[Contender, int]:
    import tailrace as tr

    made = tr.Trainer(loss_fn, optax.adam(RATE), workload.init_params(), accumulation=COUNT)
    peak = made.explain(next(iter(batches)), steps=STEPS).peak_bytes
    steps = len(batches) // COUNT
    run = lambda: made.fit(batches, steps=steps, progress=False).loss  # noqa: E731
    return Contender("tr.Trainer(accumulation=8)", run), peak


def keras_fit(batches: HostBatches) -> Contender:
    import keras

    if keras.backend.backend() != "jax":
        raise ImportError(f"its backend here is {keras.backend.backend()}")
    dense = keras.layers.Dense
    model = keras.Sequential([keras.Input((784,)), dense(128, "relu"), dense(10)])
    model.set_weights([leaf for layer in workload.init_params() for leaf in layer])
    model.compile(
        keras.optimizers.Adam(RATE, epsilon=1e-8, gradient_accumulation_steps=COUNT),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        steps_per_execution=STEPS * COUNT,
    )

    def run() -> np.ndarray:
        epochs, rest = divmod(len(batches), len(batches.images) // BATCH)
        if rest:
            raise SystemExit("--steps must be a multiple of 125 with Keras")
        found = model.fit(batches.images, batches.labels, BATCH, epochs, verbose=0, shuffle=False)
        return np.array(found.history["loss"])

    note = (
        "arrays, its fastest input; one mean loss an epoch; its program cannot be asked for bytes"
    )
    return Contender("Keras fit, gradient_accumulation_steps=8", run, note)


# -- helpers ------------------------------------------------------------------------------------


def _by_step(losses: np.ndarray) -> np.ndarray:
    """One loss a step, the mean over its microbatches, as the history of a Trainer has it."""
    return losses.reshape(-1, COUNT).mean(axis=1, dtype=np.float64).astype(np.float32)


def _peak_bytes(compiled: Any, state: Any, batches: HostBatches) -> int:
    elements = tuple(
        jax.ShapeDtypeStruct((STEPS * COUNT, *leaf.shape), leaf.dtype)
        for leaf in next(iter(batches))
    )
    memory = compiled.lower(state, elements).compile().memory_analysis()
    return int(
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
        + memory.temp_size_in_bytes
    )


def check_losses(contenders: list[Contender]) -> str:
    expected = next(c for c in contenders if c.name == LIMIT).run()
    lines = ["Losses of the first run, against the nested scan:", ""]
    for contender in contenders:
        found = contender.run()
        wanted = expected
        if len(found) != len(expected):
            wanted = expected.reshape(len(found), -1).mean(axis=1, dtype=np.float64)
        far = float(np.max(np.abs(found - wanted)))
        same = "bit-equal" if np.array_equal(found, wanted) else f"differ by {far:.1e} at most"
        lines.append(f"- {contender.name}: {same}")
        if far > 1e-2:
            raise SystemExit(f"{contender.name} computes something else: {same}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()

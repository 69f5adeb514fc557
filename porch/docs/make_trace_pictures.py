"""Make the pictures of timelines and profiles: `python docs/make_trace_pictures.py`.

Runs the two classifiers of the examples and draws when programs ran on the device; profiles a small
network and draws its treemap. Times are measured, so the pictures differ from run to run.
Needs `pip install 'tailrace[trace]'`.
"""

import sys
from html import escape
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

import tailrace as tr

HERE = Path(__file__).parent
IMAGES = HERE / "images"
WIDTH, LEFT, ROW, GAP = 900, 120, 46, 34


def execution_traces(window_s: float = 0.06) -> str:
    """Two rows: runs on the device with feeds and without, over the same span of time."""
    sys.path.insert(0, str(HERE.parent / "examples"))
    import execution_traces as example

    fed, plain = example.main(steps=2000, steps_per_execution=100)
    parts = []
    for number, (name, (runs, _, _)) in enumerate(
        {"with feeds": fed, "without feeds": plain}.items()
    ):
        top = 30 + number * (ROW + GAP)
        begin = runs[len(runs) // 2].start
        shown = [r for r in runs if r.end > begin and r.start < begin + window_s * 1e9]
        steps = 2000 // len(runs)
        label = f"{len(shown)} runs of {steps} step{'s' * (steps > 1)}"
        parts.append(
            f'<text x="{LEFT - 10}" y="{top + 28}" text-anchor="end">{escape(name)}</text>'
            f'<text x="{LEFT}" y="{top - 6}" fill="#777">{label} in {window_s * 1e3:.0f} ms</text>'
            f'<rect x="{LEFT}" y="{top}" width="{WIDTH - LEFT - 10}" height="{ROW}" fill="#8882"/>'
        )
        scale = (WIDTH - LEFT - 10) / (window_s * 1e9)
        for one in shown:
            x = LEFT + max(0, one.start - begin) * scale
            end = LEFT + min(window_s * 1e9, one.end - begin) * scale
            parts.append(
                f'<rect x="{x:.2f}" y="{top}" width="{max(end - x, 0.3):.2f}" height="{ROW}" '
                f'fill="#4477aa" stroke="#fff" stroke-width="0.5"/>'
            )
    height = 30 + 2 * (ROW + GAP)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'aria-label="Runs on the device, with feeds and without" font-size="13" '
        f'font-family="system-ui, sans-serif" fill="#888">{"".join(parts)}</svg>\n'
    )


def network(params: dict, x: jax.Array, y: jax.Array) -> jax.Array:
    """Three blocks, of which one is much too wide."""
    for block in ("block0", "block1", "block2"):
        with jax.named_scope(block):
            with jax.named_scope("mix"):
                h = jax.nn.gelu(x @ params[block]["up"])
            with jax.named_scope("project"):
                x = x + h @ params[block]["down"]
    with jax.named_scope("head"):
        return ((x.mean(axis=1) - y) ** 2).mean()


def profile() -> str:
    """The treemap of a step."""
    rng = np.random.default_rng(0)
    sizes = {"block0": 128, "block1": 1024, "block2": 128}
    params = {
        name: {
            "up": rng.normal(size=(128, wide)).astype(np.float32) * 0.05,
            "down": rng.normal(size=(wide, 128)).astype(np.float32) * 0.05,
        }
        for name, wide in sizes.items()
    }
    x = rng.normal(size=(1024, 128)).astype(np.float32)
    trainer = tr.Trainer(
        network,
        optax.adam(1e-3),
        params,
        accumulation=2,
        steps_per_execution=10,
        observe=["grad/*"],
    )
    found = trainer.profile(tr.batches((x, jnp.asarray(x[:, 0])), 128, repeat=True))
    print(found)
    return f"{found.treemap()}\n"


if __name__ == "__main__":
    for name, make in {"execution_traces": execution_traces, "profile_treemap": profile}.items():
        (IMAGES / f"{name}.svg").write_text(make(), encoding="utf-8")
        print(f"Saved {IMAGES / name}.svg")

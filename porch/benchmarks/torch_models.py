"""The seed's PyTorch model, trained: `tt.training_model` against PyTorch itself and `tr.Trainer`.

    python -m benchmarks.torch_models [--steps N] [--repeats N] [--only PART,...] [--batch 32,1000]

A classifier 784-320-100-10, SGD, batches from the host's memory, the last loss of each call on the
host. A case is a batch size, a number of steps to a call, and whether six gradients of the last step
of each call are wanted on the host too (anchors here, `.grad` in PyTorch). Eager PyTorch and
torch.compile step by step; the CUDA graph (on a GPU) replays a captured step.
"""

import itertools
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
from torch import nn

import tailrace as tr
import tailrace.torch as tt
from benchmarks import report
from benchmarks.report import Contender

RATE = 0.01
LIMIT = "tr.Trainer"
GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(784, 320)
        self.fc2 = nn.Linear(320, 100)
        self.fc3 = nn.Linear(100, 10)

    def forward(self, x: Any, labels: Any) -> Any:
        x = torch.relu(self.fc1(x))
        x = torch.relu(self.fc2(x))
        x = nn.functional.log_softmax(self.fc3(x), dim=1)
        return x, nn.functional.nll_loss(x, labels)


def main(arguments: list[str] | None = None) -> None:
    parser = report.common_flags(__doc__, steps=500, repeats=7)
    parser.add_argument("--batch", default="1000,32", help="batch sizes (%(default)s)")
    flags = parser.parse_args(arguments)
    parts, skipped = [], set()
    sizes = [int(size) for size in flags.batch.split(",")]
    for batch, length, anchors in itertools.product(sizes, (1, 100), (False, True)):
        steps = max(flags.steps if batch < 500 else flags.steps // 5, length)
        case = Case(batch, length, anchors, steps - steps % length)
        contenders = []
        for name, make in factories(flags.no_peers).items():
            wanted = [part for part in flags.only.split(",") if part]
            if wanted and name != LIMIT and not any(part in name for part in wanted):
                continue  # before it is made: compiling takes long
            try:
                contenders.append(make(case))
            except Unavailable as reason:
                skipped.add(str(reason))
        for contender in contenders:
            contender.run()
        report.measure(contenders, flags.repeats, say=False)
        baseline = next(c for c in contenders if c.name == LIMIT)
        table = report.timing_table(contenders, baseline, case.steps, "step")
        parts.append(f"### {case}\n\n{table}")
        print(parts[-1], file=sys.stderr)
    command = " ".join(["python -m benchmarks.torch_models", *(arguments or sys.argv[1:])])
    parts += [f"- not measured: {text}" for text in sorted(skipped)]
    title = "PyTorch: the seed's model"
    report.publish(title, command, parts, path=None if flags.no_record else report.RESULTS)


def factories(no_peers: bool) -> dict[str, Callable[["Case"], Contender]]:
    ours = {"tt.training_model": tailrace_model, LIMIT: trainer}
    peers = {"PyTorch, eager": eager, "torch.compile": compiled, "PyTorch, CUDA graph": cuda_graph}
    return ours if no_peers else ours | peers


class Unavailable(Exception):
    """A contender cannot run here."""


class Case:
    """What is measured: a batch size, steps to a call, anchors or none, and how many steps."""

    def __init__(self, batch: int, length: int, anchors: bool, steps: int) -> None:
        self.batch, self.length, self.anchors, self.steps = batch, length, anchors, steps
        generator = torch.Generator().manual_seed(0)
        rows = batch * length
        count = max(1, min(steps // length, 2 if length > 1 else 20))
        self.calls = [
            (
                torch.rand(rows, 784, generator=generator),
                torch.randint(0, 10, (rows,), generator=generator),
            )
            for _ in range(count)
        ]

    def __str__(self) -> str:
        wanted = "six gradients" if self.anchors else "nothing else"
        return f"batch {self.batch}, {self.length} steps a call, {wanted}: {self.steps} steps"

    def __iter__(self) -> Any:
        return itertools.islice(itertools.cycle(self.calls), self.steps // self.length)


def module() -> tuple[Classifier, torch.optim.Optimizer]:
    torch.manual_seed(0)
    made = Classifier()
    return made, torch.optim.SGD(made.parameters(), lr=RATE)


def tailrace_model(case: Case) -> Contender:
    made, optimizer = module()
    model = tt.training_model(made, optimizer, device_iterations=case.length)
    names = [name for name, _ in made.named_parameters()] if case.anchors else []
    for name in names:
        model.anchor_tensor(name, f"grad/{name}")

    def run() -> None:
        for images, labels in case:
            _, loss = model(images, labels)
            loss.item()
            for name in names:
                model.anchored_tensor(name)

    return Contender("tt.training_model", run)


def trainer(case: Case) -> Contender:
    made, _ = module()
    params = {name: value.detach().numpy() for name, value in made.named_parameters()}

    def loss_fn(p: Any, x: Any, y: Any) -> Any:
        for number in (1, 2):
            x = jax.nn.relu(x @ p[f"fc{number}.weight"].T + p[f"fc{number}.bias"])
        x = jax.nn.log_softmax(x @ p["fc3.weight"].T + p["fc3.bias"])
        return -jnp.take_along_axis(x, y[:, None], axis=1).mean()

    taps = [tr.Tap("grad/*", mode="final", reduce="tensor")] if case.anchors else []
    trains = tr.Trainer(
        loss_fn, optax.sgd(RATE), params, steps_per_execution=case.length, observe=taps
    )
    elements = [
        (images, labels.astype(np.int32))
        for pair in case.calls
        for images, labels in zip(*(np.split(t.numpy(), case.length) for t in pair), strict=True)
    ]

    def run() -> None:
        trains.fit(itertools.islice(itertools.cycle(elements), case.steps), steps=case.steps)
        for name in trains.records.names:
            _ = trains.records[name].values

    return Contender(LIMIT, run, "the same model in JAX, fed batch by batch")


def steps_by_hand(case: Case, made: Any, step: Callable[[Any, Any], Any]) -> Callable[[], None]:
    def run() -> None:
        for images, labels in case:
            pairs = zip(images.split(case.batch), labels.split(case.batch), strict=True)
            for x, y in pairs:
                loss = step(x, y)
            loss.item()
            if case.anchors:
                _ = [p.grad.to("cpu", copy=True) for p in made.parameters()]

    return run


def eager(case: Case) -> Contender:
    made, optimizer = module()
    made.to(DEVICE)

    def step(x: Any, y: Any) -> Any:
        optimizer.zero_grad(set_to_none=True)
        _, loss = made(x.to(DEVICE, non_blocking=True), y.to(DEVICE, non_blocking=True))
        loss.backward()
        optimizer.step()
        return loss

    return Contender("PyTorch, eager", steps_by_hand(case, made, step))


def compiled(case: Case) -> Contender:
    made, optimizer = module()
    made.to(DEVICE)
    forward = torch.compile(made)

    def step(x: Any, y: Any) -> Any:
        optimizer.zero_grad(set_to_none=True)
        _, loss = forward(x.to(DEVICE, non_blocking=True), y.to(DEVICE, non_blocking=True))
        loss.backward()
        optimizer.step()
        return loss

    try:
        step(*(t[: case.batch] for t in case.calls[0]))
    except Exception as error:
        reason = f"torch.compile: {str(error).splitlines()[0]}"
        raise Unavailable(reason) from error
    return Contender("torch.compile", steps_by_hand(case, made, step))


def cuda_graph(case: Case) -> Contender:
    if not GPU:
        raise Unavailable("a CUDA graph: no GPU")
    made, optimizer = module()
    made.to(DEVICE)
    still_x = torch.zeros(case.batch, 784, device=DEVICE)
    still_y = torch.zeros(case.batch, dtype=torch.long, device=DEVICE)

    def compute() -> Any:
        optimizer.zero_grad(set_to_none=False)
        _, loss = made(still_x, still_y)
        loss.backward()
        optimizer.step()
        return loss

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            compute()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = compute()

    def step(x: Any, y: Any) -> Any:
        still_x.copy_(x, non_blocking=True)
        still_y.copy_(y, non_blocking=True)
        graph.replay()
        return loss

    return Contender("PyTorch, CUDA graph", steps_by_hand(case, made, step))


if __name__ == "__main__":
    main()

"""The peer of `benchmarks/pipelines.py`: torch.distributed.pipelining, a process for each stage.

Run as a script this file is one stage. It reads orders `schedule steps`, trains, and answers each
with its losses.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.workers import Worker, serve


class Crew:
    """Two processes that wait for orders.

    Args:
        widths: of the layers.
        cut: how many layers the first stage has.
        count: microbatches in a step.
        rate: of SGD.
        limit_s: how long to wait for an answer.
    """

    def __init__(
        self, widths: Sequence[int], cut: int, count: int, rate: float, limit_s: float
    ) -> None:
        self.first_losses: list[float] = []
        self._folder = tempfile.TemporaryDirectory()
        # Processes find each other by a file: no port to choose.
        store = str(Path(self._folder.name) / "store")
        what = {"widths": list(widths), "cut": cut, "count": count, "rate": rate, "store": store}
        one_thread = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        self._workers = [
            Worker(
                ["-m", "benchmarks.torch_pipeline", json.dumps({**what, "rank": rank})],
                limit_s,
                one_thread,
            )
            for rank in range(2)
        ]

    def run(self, schedule: str, steps: int) -> None:
        """Train a number of steps by "GPipe" or "1F1B"; returns when both processes are done."""
        for worker in self._workers:
            worker.tell(f"{schedule} {steps}")
        for worker in self._workers:
            losses = worker.answer()["losses"]
            if losses and not self.first_losses:
                self.first_losses = losses

    def dismiss(self) -> None:
        """End the processes."""
        for worker in self._workers:
            worker.dismiss()
        self._folder.cleanup()


# -- one stage -------------------------------------------------------------------------------------


def work(what: dict[str, Any]) -> None:
    """Be one stage until the orders end."""
    import torch
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

    from benchmarks.pipelines import make_data, make_params

    torch.set_num_threads(1)
    rank = what["rank"]
    dist.init_process_group("gloo", init_method=f"file://{what['store']}", rank=rank, world_size=2)
    stage_layers = make_params()
    own = stage_layers[: what["cut"]] if rank == 0 else stage_layers[what["cut"] :]
    parts: list[Any] = []
    for number, layer in enumerate(own):
        linear = torch.nn.Linear(*layer["kernel"].shape)
        with torch.no_grad():
            linear.weight.copy_(torch.from_numpy(layer["kernel"].T.copy()))
            linear.bias.copy_(torch.from_numpy(layer["bias"]))
        parts.append(linear)
        if rank == 0 or number < len(own) - 1:
            parts.append(torch.nn.ReLU())
    module = torch.nn.Sequential(*parts)
    optimizer = torch.optim.SGD(module.parameters(), lr=what["rate"])
    images, labels = make_data()
    x, y = torch.from_numpy(images), torch.from_numpy(labels).long()
    kinds = {"GPipe": ScheduleGPipe, "1F1B": Schedule1F1B}
    schedules: dict[str, Any] = {}

    def order(line: str) -> dict[str, list[float]]:
        name, steps = line.split()
        if name not in schedules:
            stage = PipelineStage(module, rank, 2, torch.device("cpu"))
            loss_fn = torch.nn.functional.cross_entropy
            schedules[name] = kinds[name](stage, n_microbatches=what["count"], loss_fn=loss_fn)
        found: list[float] = []
        for _ in range(int(steps)):
            optimizer.zero_grad()
            losses: list[Any] = []
            if rank == 0:
                schedules[name].step(x)
            else:
                schedules[name].step(target=y, losses=losses)
            optimizer.step()
            if losses:
                found.append(float(sum(loss.item() for loss in losses) / len(losses)))
        return {"losses": found}

    serve(order)


if __name__ == "__main__":
    work(json.loads(sys.argv[1]))

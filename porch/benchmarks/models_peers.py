"""Models of the zoo in Keras and in PyTorch, each trained by its own loop and by Tailrace."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from benchmarks.report import Contender

RATE = 0.01


def keras_convnet(steps: int) -> tuple[dict[str, int], list[Contender]]:
    """Two convolutions with BatchNorm and pooling: `fit`, and `fit` of the adopted model."""
    import tailrace.keras as tk  # isort: skip  (before keras: it chooses the backend)
    import keras

    rng = np.random.default_rng(0)
    images = rng.normal(size=(steps * 32, 28, 28, 1)).astype(np.float32)
    labels = rng.integers(0, 10, steps * 32).astype(np.int32)

    def fit(adopted: bool, execution: int) -> Callable[[], Any]:
        layers = keras.layers
        stack: list[Any] = [keras.Input((28, 28, 1))]
        for width in (32, 64):
            stack += [layers.Conv2D(width, 3, padding="same"), layers.BatchNormalization()]
            stack += [layers.ReLU(), layers.MaxPooling2D()]
        model: Any = keras.Sequential([*stack, layers.Flatten(), layers.Dense(10)])
        model = tk.adopt(model) if adopted else model
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(RATE), loss, steps_per_execution=execution)
        return lambda: model.fit(images, labels, 32, verbose=0, shuffle=False)

    contenders = [Contender("Keras fit", fit(False, 1)), Contender("tk fit", fit(True, steps))]
    return {c.name: steps for c in contenders}, contenders


def torch_resnet(steps: int) -> tuple[dict[str, int], list[Contender]]:
    """ResNet-18 for 32x32 images: eager PyTorch, torch.compile on a GPU, and `tt`."""
    if not importlib.util.find_spec("torch"):
        return {"(PyTorch is not installed)": 1}, [
            Contender("(PyTorch is not installed)", lambda: None)
        ]
    import torch

    import tailrace.torch as tt

    large = jax.devices()[0].platform != "cpu"
    device, batch = ("cuda", 128) if large and torch.cuda.is_available() else ("cpu", 16)
    steps = steps if large else max(2, steps // 10)
    rng = np.random.default_rng(0)
    images = torch.tensor(rng.normal(size=(steps * batch, 3, 32, 32)).astype(np.float32))
    labels = torch.tensor(rng.integers(0, 10, steps * batch))

    def by_torch(compiled: bool) -> Callable[[], Any]:
        model: Any = residual_network().to(device)
        optimizer = torch.optim.SGD(model.parameters(), RATE)
        model = torch.compile(model) if compiled else model

        def run() -> Any:
            losses = []
            for i in range(steps):
                rows = slice(i * batch, (i + 1) * batch)
                optimizer.zero_grad()
                loss = model(images[rows].to(device), labels[rows].to(device))[1]
                loss.backward()
                optimizer.step()
                losses.append(loss.detach())
            return torch.stack(losses).cpu()

        return run

    module = residual_network()
    ours = tt.training_model(
        module,
        torch.optim.SGD(module.parameters(), RATE),
        device_iterations=steps,
        output_mode="all",
    )
    contenders = [Contender("eager PyTorch", by_torch(False))]
    if device == "cuda":
        contenders.append(Contender("torch.compile", by_torch(True)))
    contenders.append(Contender("tt.training_model", lambda: ours(images, labels)))
    return {c.name: steps for c in contenders}, contenders


def residual_network() -> Any:
    """ResNet-18 as for CIFAR: a 3x3 stem, no pooling before the blocks."""
    import torch
    from torch import nn
    from torch.nn import functional

    class Block(nn.Module):
        def __init__(self, before: int, width: int, stride: int) -> None:
            super().__init__()
            self.first = nn.Conv2d(before, width, 3, stride, 1, bias=False)
            self.second = nn.Conv2d(width, width, 3, 1, 1, bias=False)
            self.norms = nn.ModuleList([nn.BatchNorm2d(width), nn.BatchNorm2d(width)])
            self.past = nn.Identity()
            if stride > 1:
                self.past = nn.Conv2d(before, width, 1, stride, bias=False)

        def forward(self, x: Any) -> Any:
            y = torch.relu(self.norms[0](self.first(x)))
            return torch.relu(self.norms[1](self.second(y)) + self.past(x))

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            blocks, before = [], 64
            for width in (64, 128, 256, 512):
                for number in (0, 1):
                    blocks.append(Block(before, width, 2 if number == 0 and width > 64 else 1))
                    before = width
            self.stem = nn.Conv2d(3, 64, 3, 1, 1, bias=False)
            self.blocks, self.out = nn.Sequential(*blocks), nn.Linear(512, 10)

        def forward(self, x: Any, labels: Any) -> Any:
            x = self.out(self.blocks(torch.relu(self.stem(x))).mean((2, 3)))
            return x, functional.cross_entropy(x, labels)

    torch.manual_seed(0)
    return Network()

"""Models of the zoo in Keras and in PyTorch, each trained by its own loop and by Tailrace."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple

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
        return nothing()
    import torch

    large = jax.devices()[0].platform != "cpu"
    device, batch = ("cuda", 128) if large and torch.cuda.is_available() else ("cpu", 16)
    steps = steps if large else max(2, steps // 10)
    rng = np.random.default_rng(0)
    images = torch.tensor(rng.normal(size=(steps * batch, 3, 32, 32)).astype(np.float32))
    labels = torch.tensor(rng.integers(0, 10, steps * batch))
    task = Task(residual_network, images, labels, batch, torch.optim.SGD, RATE)
    return against_torch(task, steps, device)


def torch_gpt(steps: int) -> tuple[dict[str, int], list[Contender]]:
    """GPT-2 small under bfloat16 autocast: eager PyTorch, torch.compile on a GPU, and `tt`."""
    if not importlib.util.find_spec("torch"):
        return nothing()
    import torch

    large = jax.devices()[0].platform != "cpu"
    device, batch = ("cuda", 8) if large and torch.cuda.is_available() else ("cpu", 2)
    layers, width, length = (12, 768, 1024) if large else (2, 128, 64)
    tokens = np.random.default_rng(0).integers(0, 50304, (steps * batch, length + 1))
    rows = torch.tensor(tokens)
    make = lambda: language_model(layers, width, length, device)  # noqa: E731
    inputs, targets = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
    return against_torch(Task(make, inputs, targets, batch, torch.optim.AdamW, 1e-4), steps, device)


class Task(NamedTuple):
    """A module that takes inputs and targets and returns the loss last, and what it learns from."""

    module: Callable[[], Any]
    inputs: Any
    targets: Any
    batch: int
    optimizer: Any
    rate: float


def nothing() -> tuple[dict[str, int], list[Contender]]:
    """The contest where PyTorch is missing."""
    name = "(PyTorch is not installed)"
    return {name: 1}, [Contender(name, lambda: None)]


def against_torch(task: Task, steps: int, device: str) -> tuple[dict[str, int], list[Contender]]:
    """A training by eager PyTorch, by torch.compile on a GPU, and by `tt`."""
    import torch

    import tailrace.torch as tt

    def by_torch(compiled: bool) -> Callable[[], Any]:
        model: Any = task.module().to(device)
        optimizer = task.optimizer(model.parameters(), task.rate)
        model = torch.compile(model) if compiled else model

        def run() -> Any:
            losses = []
            for i in range(steps):
                rows = slice(i * task.batch, (i + 1) * task.batch)
                optimizer.zero_grad()
                loss = model(task.inputs[rows].to(device), task.targets[rows].to(device))[-1]
                loss.backward()
                optimizer.step()
                losses.append(loss.detach())
            return torch.stack(losses).cpu()

        return run

    module = task.module()
    optimizer = task.optimizer(module.parameters(), task.rate)
    ours = tt.training_model(module, optimizer, device_iterations=steps, output_mode="all")
    contenders = [Contender("eager PyTorch", by_torch(False))]
    if device == "cuda":
        contenders.append(Contender("torch.compile", by_torch(True)))
    contenders.append(Contender("tt.training_model", lambda: ours(task.inputs, task.targets)))
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


def language_model(layers: int, width: int, length: int, device: str) -> Any:
    """GPT-2: blocks of attention and perceptron, each after a LayerNorm; one table for both ends."""
    import torch
    from torch import nn
    from torch.nn import functional

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
            self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x: Any) -> Any:
            rows, length, _ = x.shape
            parts = self.qkv(self.norms[0](x)).view(rows, length, 3, -1, 64).unbind(2)
            q, k, v = (part.transpose(1, 2) for part in parts)
            seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(seen.transpose(1, 2).reshape(rows, length, width))
            return x + self.down(functional.gelu(self.up(self.norms[1](x)), approximate="tanh"))

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.places = nn.Embedding(50304, width), nn.Embedding(length, width)
            self.blocks = nn.Sequential(*(Block() for _ in range(layers)))
            self.norm = nn.LayerNorm(width)
            for table in (self.tokens, self.places):
                nn.init.normal_(table.weight, std=0.02)

        def forward(self, tokens: Any, targets: Any) -> Any:
            with torch.autocast(device, torch.bfloat16):
                x = self.tokens(tokens) + self.places.weight
                logits = functional.linear(self.norm(self.blocks(x)), self.tokens.weight)
            loss = functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
            return (loss,)

    torch.manual_seed(0)
    return Network()

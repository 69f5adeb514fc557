"""The original's names of tensors, and the tensors that they refer to here.

fc1.weight                     updated/fc1.weight (training), param/fc1.weight (inference)
input, input/1                 input/<parameter of forward>
fc1/Add:0, fc1/Add:0/1         activation/fc1/...:add
Gradient___X                   grad/X of a parameter, cotangent/... of an activation
UpdatedVar___X                 updated/X
Accum___X                      accumulated/X
Accl1___X, Accl2___X, ...      optimizer/<state>/X
Step___X                       optimizer/step
scaledLearningRate0___..., ... a number of the optimizer
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tailrace.errors import SelectionError
from tailrace.taps.catalogue import Catalogue
from tailrace.torch.optim.binding import DeviceOptimizer
from tailrace.torch.optim.loss_scaling import FACTOR
from tailrace.torch.optim.rules import COLUMNS

_SLOTS = {
    ("sgd", "momentum_buffer"): "Accl1",
    ("adam", "exp_avg"): "Accl1",
    ("adam", "exp_avg_sq"): "Accl2",
    ("adam", "max_exp_avg_sq"): "Accl3",
    ("lamb", "exp_avg"): "Accl1",
    ("lamb", "exp_avg_sq"): "Accl2",
    ("rmsprop", "square_avg"): "Accl1",
    ("rmsprop", "grad_avg"): "Accl2",
    ("rmsprop", "momentum_buffer"): "Accl3",
}

_NUMBERS: dict[str, dict[str, Callable[[Any], Any]]] = {
    "sgd": {
        # PopART combines numbers before it updates; these are what it computes with.
        "scaledLearningRate0": lambda h: h("lr") / h("loss_scaling"),
        "weightDecayScaleFactor0": lambda h: 1 - h("lr") * h("weight_decay"),
    },
    "adam": {"learningRate": lambda h: h("lr"), "weightDecay": lambda h: h("weight_decay")},
    "rmsprop": {"learningRate": lambda h: h("lr"), "weightDecay": lambda h: h("weight_decay")},
    "lamb": {
        "learningRate": lambda h: h("lr"),
        "weightDecay": lambda h: h("weight_decay"),
        "maxWeightNorm": lambda h: h("max_weight_norm"),
    },
}
"""The numbers of an optimizer that have separate names."""


_FUNCTIONS = {"linear", "batch_norm", "conv1d", "conv2d", "conv3d", "einsum", "embedding", "pad"}
"""Functions of PyTorch that open a scope with their name while they are traced."""


@dataclasses.dataclass(frozen=True)
class Meaning:
    """The meaning of a name: a tensor, and the part of it (None for all)."""

    tensor: str
    pick: Callable[[Any], Any] | None = None


class Names:
    """The names of one compiled model.

    Args:
        catalogue: its tensors.
        inputs: the names of its inputs, in the order of forward.
        trained: the parameters that training changes.
        optimizer: its optimizer; None for inference.
        accumulates: whether a step has several microbatches.
    """

    def __init__(
        self,
        catalogue: Catalogue,
        inputs: Sequence[str],
        trained: Sequence[str] = (),
        optimizer: DeviceOptimizer | None = None,
        accumulates: bool = False,
    ) -> None:
        self._catalogue = catalogue
        self.meanings: dict[str, Meaning] = {}
        self._weights(set(trained), optimizer is not None, accumulates)
        for number, name in enumerate(inputs):
            self.meanings[f"input/{number}" if number else "input"] = Meaning(f"input/{name}")
        self._operations()
        if optimizer is not None:
            for name, meaning in _optimizer_names(optimizer):
                self.meanings[name] = meaning

    def all(self) -> list[str]:
        """All names, sorted."""
        return sorted(self.meanings)

    def find(self, name: str) -> Meaning:
        """The meaning of a name, with or without `model.` in front of a weight's name."""
        for spelling in _spellings(name):
            if spelling in self.meanings:
                return self.meanings[spelling]
        if name in self._catalogue:  # a native name does no harm
            return Meaning(name)
        start = f"Anchor tensor `{name}' not in Ir Tensors."
        plain = name.removeprefix("Gradient___")
        if plain != name and any(s in self.meanings for s in _spellings(plain)):
            raise SelectionError(
                f"{start} {plain!r} is there: not all tensors have a gradient, only those that flow "
                f"into the loss in a differentiable way, of a training model."
            )
        near = difflib.get_close_matches(name, self.meanings, n=5, cutoff=0.3)
        near = near or list(self.meanings)[:5]
        raise SelectionError(
            f"{start} The nearest are: {near}. All: model.getTensorNames(), after compiling without "
            f"this anchor."
        )

    def _weights(self, trained: set[str], training: bool, accumulates: bool) -> None:
        for entry in self._catalogue:
            kind, _, name = entry.name.partition("/")
            # The name of a trained weight is its value after the update, as PopTorch's anchors show it.
            if kind == "buffer" or (kind == "param" and name not in trained):
                self.meanings[name] = Meaning(entry.name)
            elif kind == "updated" and name in trained:
                self.meanings[name] = self.meanings[f"UpdatedVar___{name}"] = Meaning(entry.name)
            elif kind == "grad" and name in trained:
                self.meanings[f"Gradient___{name}"] = Meaning(entry.name)
            elif kind == "accumulated" and accumulates and name in trained:
                self.meanings[f"Accum___{name}"] = Meaning(entry.name)

    def _operations(self) -> None:
        counts: dict[str, int] = {}
        backward = {e.name for e in self._catalogue if e.kind == "cotangent"}
        for entry in self._catalogue:
            # `aten::relu` has colons of its own; a single one separates the operation from its
            # scope.
            if entry.kind != "activation" or ":" not in entry.name.replace("::", "  "):
                continue
            name = _operation(entry.name)
            # PopART numbers operations of one name in a scope, without a number for the first.
            number = counts[name] = counts.get(name, -1) + 1
            name = f"{name}/{number}" if number else name
            self.meanings[name] = Meaning(entry.name)
            # Of values that do not lead to the loss there is none.
            back = entry.name.replace("activation/", "cotangent/", 1)
            if back in backward:
                self.meanings[f"Gradient___{name}"] = Meaning(back)


def _operation(name: str) -> str:
    """`activation/a.b/aten::relu:max` becomes `a/b/Max:0`."""
    scope, _, operation = name.removeprefix("activation/").replace("::", "  ").rpartition(":")
    parts = [part for part in scope.split("/") if not _is_function(part)]
    path = "/".join(parts).replace(".", "/")
    operation = re.sub(r"\.\d+$", "", operation.rsplit("/", 1)[-1])
    made = "".join(word.capitalize() for word in operation.split("_"))
    return f"{path}/{made}:0" if path else f"{made}:0"


def _is_function(part: str) -> bool:
    """Whether a scope is that of a function of PyTorch, not of a module or of the user."""
    return "  " in part or "->" in part or part.split("#")[0] in _FUNCTIONS


def _spellings(name: str) -> Iterator[str]:
    """A name as it is, then with one `model.` removed or added after its prefix."""
    yield name
    # Older versions of the original had the module as an attribute `model`; programs have both
    # names.
    prefix, mark, rest = name.rpartition("___")
    head = f"{prefix}{mark}"
    if rest.startswith("model."):
        yield f"{head}{rest.removeprefix('model.')}"
    yield f"{head}model.{rest}"


def _optimizer_names(optimizer: DeviceOptimizer) -> Iterator[tuple[str, Meaning]]:
    several = len(optimizer.groups) > 1
    for number, rule in enumerate(optimizer.groups):
        for name in rule.params:
            for slot in rule.slots:
                title = _SLOTS[rule.kind, slot]
                yield f"{title}___{name}", Meaning(f"optimizer/{slot}/{name}")
            # Without the correction of the bias no step is needed.
            if rule.kind in ("adam", "lamb") and "uncorrected" not in rule.flags:
                yield f"Step___{name}", Meaning("optimizer/step", lambda v: v.astype("float32"))
        for title, formula in _NUMBERS[rule.kind].items():
            meaning = Meaning("optimizer/hyper", _picked(number, formula))
            # A default exists only if all groups have the same numbers.
            if not several:
                yield f"{title}___default___FLOAT", meaning
            for name in rule.params:
                yield f"{title}___specific___{name}", meaning
    if optimizer.automatic:
        first = optimizer.loss_scaling
        yield FACTOR, Meaning(f"updated/{FACTOR}")
        # `param`, not `updated`: the scale that this step used, not that of the next.
        yield "finalLossScale", Meaning(f"param/{FACTOR}", lambda factor: factor * first)
    yield "lossScaling_FLOAT", Meaning("optimizer/hyper", _picked(0, lambda h: h("loss_scaling")))


def _picked(group: int, formula: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda hyper: formula(lambda name: hyper[group, COLUMNS.index(name)])

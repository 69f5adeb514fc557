"""A random script of fits that are broken off in many ways, and the plain loop that it must equal.

The loss of a step is the parameter plus the element, and an update adds one to the parameter: so both
say which steps were trained, and which elements they took.
"""

from __future__ import annotations

import dataclasses
import os
import random
import signal

import jax.numpy as jnp
import numpy as np

import tailrace as tr

ELEMENTS = 10
"""The elements of a dataset, and so the steps of an epoch."""

EVERY = 3
"""The period of the periodic tap."""

TAPS = [
    tr.Tap("input/*", reduce="tensor"),
    tr.Tap("input/*", reduce="norm", mode=tr.every(EVERY)),
    tr.Tap("grad/*", reduce="tensor", mode="sum"),
    tr.Tap("param/*", reduce="tensor", mode="final"),
]


class Killed(BaseException):
    """What a test raises where a process is killed; nothing that is done after it counts."""


@dataclasses.dataclass
class Fit:
    """One fit of a script, and what happens in it.

    Attributes:
        call: `steps` or `epochs`.
        bad: the elements that are not finite.
        acts: what a callback does at the end of the execution that has a step, by step of the fit:
            "raise", "stop", "interrupt", "kill", "set".
        ends: the element at which the dataset raises; None for never.
        validates: every how many steps it validates; None for no validation.
        best: whether early stopping restores the best state.
        before: "rewind", "restore", "put" or "", what is done before it.
        back: where to, as a share of the steps so far.
        listens: whether it has callbacks that are told of executions.
    """

    call: dict[str, int]
    bad: tuple[int, ...] = ()
    acts: dict[int, str] = dataclasses.field(default_factory=dict)
    ends: int | None = None
    validates: int | None = None
    best: bool | None = None
    before: str = ""
    back: float = 0.0
    listens: bool = True


@dataclasses.dataclass
class Script:
    """A trainer's options and its fits."""

    guard: str
    limit: int
    length: int
    keeps: bool
    fits: list[Fit]


def drawn(seed: int) -> Script:
    """A random script."""
    rng = random.Random(seed)
    guard = rng.choice(["none", "stop", "skip", "scale"])
    keeps = rng.random() < 0.6
    fits = [_drawn_fit(rng, guard, keeps, number) for number in range(rng.randint(1, 4))]
    return Script(guard, rng.choice([1, 3, 20]), rng.choice([1, 3, 4]), keeps, fits)


def _drawn_fit(rng: random.Random, guard: str, keeps: bool, number: int) -> Fit:
    call = rng.choice([{"steps": rng.randint(1, ELEMENTS)}, {"epochs": rng.randint(1, 3)}])
    most = call.get("steps") or call["epochs"] * ELEMENTS
    bad = (
        tuple(sorted(rng.sample(range(ELEMENTS), rng.choice([0, 1, 2])))) if guard != "none" else ()
    )
    listens, acts = rng.random() < 0.8, {}
    if listens:
        kinds = ["raise", "stop", "interrupt", "set", "kill"] if keeps else ["raise", "stop", "set"]
        acts = {rng.randrange(most): rng.choice(kinds) for _ in range(rng.choice([0, 1, 1, 2]))}
    back = ["", "", "restore", "put", "rewind"] if keeps else ["", "", "put"]
    validates = rng.choice([None, None, 2, 5])
    return Fit(
        call,
        bad,
        acts,
        rng.choice([None] * 5 + [rng.randrange(1, ELEMENTS)]),
        validates,
        rng.choice([None, True, False]) if validates and listens else None,
        rng.choice(back) if number else "",
        rng.random(),
        listens,
    )


# -- the plain loop -----------------------------------------------------------------------------------


class Plain:
    """What must be recorded of the fits so far: kept by a plain loop.

    Attributes:
        step: the number of the next step.
        value: the parameter.
        losses: the loss of each step that counts, by step.
        elements: its element.
        skipped: whether it was skipped.
        values: the parameter before each step, with what was set there.
        ends: the parameter after each number of steps, when a fit was there.
        first: the first step of the latest fit.
        trained: all steps of the latest fit, also those that were undone at its end.
    """

    def __init__(self, guard: str) -> None:
        self.skips = guard in ("skip", "scale")
        self.step, self.value, self.first = 0, 0.0, 0
        self.losses: dict[int, float] = {}
        self.elements: dict[int, float] = {}
        self.skipped: dict[int, bool] = {}
        self.values: dict[int, float] = {0: 0.0}
        self.ends: dict[int, float] = {0: 0.0}

    def go_back(self, step: int) -> None:
        """To the state before a step; its rows are replaced by what comes next."""
        self.step, self.value = step, self.values[step]

    def put(self, value: float) -> None:
        """Set the parameter."""
        self.value = self.values[self.step] = value

    def train(self, fit: Fit, count: int, sets: dict[int, float]) -> None:
        """The steps of one fit."""
        self.first = self.step
        for kept in (self.losses, self.elements, self.skipped):
            for step in [step for step in kept if step >= self.step]:
                del kept[step]
        for number in range(count):
            element, step = number % ELEMENTS, self.step
            bad = element in fit.bad
            self.elements[step] = float("nan") if bad else element
            self.losses[step] = float("nan") if bad else self.value + element
            self.skipped[step] = bad and self.skips
            self.value += not self.skipped[step]
            self.step += 1
            self.put(sets.get(self.step, self.value))
            self.ends[self.step] = self.value

    def of_fit(self, values: dict[int, float]) -> dict[int, float]:
        """Those of the latest fit."""
        return {step: value for step, value in values.items() if step >= self.first}


# -- the same with a trainer --------------------------------------------------------------------------


def loss_fn(w, x, gradient):
    return (w * gradient + x).mean()


def evaluated(w, x, gradient):
    return {"loss": (w - 5.0) ** 2}


def elements_of(fit: Fit):
    """The dataset of a fit: a function that makes an iterator, which may raise."""

    def made():
        for number in range(ELEMENTS):
            if number == fit.ends:
                raise OSError("the disk goes away")
            bad = number in fit.bad
            x = np.full(2, np.nan if bad else number, np.float32)
            yield x, np.full(2, np.nan if bad else 1, np.float32)

    return made


class Watch(tr.Callback):
    """Keeps what it is told, in checkpoints too."""

    def __init__(self):
        self.steps, self.executions, self.validations, self.states = [], [], [], []

    def on_step_end(self, trainer, step, values):
        self.steps.append([step, values["loss"]])

    def on_execution_end(self, trainer, execution):
        self.executions.append([execution.first_step, execution.steps])
        self.states.append([trainer.step, float(trainer.params)])

    def on_validation_end(self, trainer, logs):
        self.validations.append([trainer.step, logs["val_loss"]])

    def get_state(self):
        return dict(vars(self))

    def set_state(self, state):
        vars(self).update({name: list(value) for name, value in state.items()})


class Acts(tr.Callback):
    """Does what a fit says, at the end of the execution with that step; kills and signals only once."""

    def __init__(self, fit: Fit, first: int, done: set, sets: dict[int, float], copy):
        self.fit, self.first, self.done, self.sets, self.copy = fit, first, done, sets, copy

    def on_execution_end(self, trainer, execution):
        start = execution.first_step - self.first
        for step in range(start, start + execution.steps):
            what = self.fit.acts.get(step)
            once = (id(self.fit), step)
            if what in ("kill", "interrupt") and (once in self.done or self.copy is None):
                continue
            self.done.add(once)
            self._act(what, trainer)

    def _act(self, what, trainer):
        if what == "raise":
            raise ArithmeticError("a callback raises")
        if what == "stop":
            trainer.stop()
        if what == "interrupt":
            os.kill(os.getpid(), signal.SIGINT)
        if what == "kill":
            self.copy()
            raise Killed
        if what == "set":
            put(trainer, float(trainer.params) + 100)
            self.sets[trainer.step] = float(trainer.params)


def put(trainer, value):
    """Set the parameter of a trainer."""
    trainer.state = trainer.state._replace(params=jnp.float32(value))

"""How programs are built: which rewrites are applied, and with which options XLA compiles them.

Both change the bits of a program, not its meaning, so they are fixed before its first step, kept in
checkpoints and runs, and used again by resumed fits and replays.
"""

# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping
from typing import Any

import jax

from tailrace.base.checks import check_flag
from tailrace.errors import OptionError

REWRITES = {
    "boundaries": "residual sums are kept in memory, where XLA's CPU compiler would compute them again",
    "convolutions": "convolutions in the form that is fastest on a CPU",
}
"""The rewrites by name, and what they do. All are for CPUs alone."""

Option = str | int | float | bool
"""The value of an option of XLA's compiler."""


@dataclasses.dataclass(frozen=True)
class Build:
    """How the programs of a training, or of one `tr.compile`, are built.

    Attributes:
        rewrites: the names of the rewrites that are applied.
        options: options of the compiler, by name.
        given: the names of rewrites and options that the user has chosen.
        chooses: whether options that are not given may be chosen for a program; not where a checkpoint
            says with which ones it was trained.
    """

    rewrites: frozenset[str] = dataclasses.field(default_factory=lambda: frozenset(REWRITES))
    options: tuple[tuple[str, Option], ...] = ()
    given: frozenset[str] = frozenset()
    chooses: bool = True

    @classmethod
    def of(cls, rewrites: object = None, compiler_options: object = None) -> Build:
        """A build from the values of `rewrites=` and `compiler_options=`."""
        switched = _checked_rewrites(rewrites)
        options = _checked_options(compiler_options)
        on = frozenset(name for name in REWRITES if switched.get(name, True))
        return cls(on, tuple(sorted(options.items())), frozenset([*switched, *options]))

    def as_recorded(self, note: object) -> Build:
        """The build that a checkpoint was trained with, where the user has not chosen otherwise.

        Args:
            note: what `recorded` returned then; of earlier versions None. Those had no boundaries, and
                XLA's own options.
        """
        said: Any = note if note is not None else {"rewrites": ["convolutions"], "options": {}}
        then = frozenset(said["rewrites"]) & REWRITES.keys()
        on = (then - self.given) | (self.rewrites & self.given)
        own = {name: value for name, value in self.options if name in self.given}
        options = {**said["options"], **own}
        return Build(on, tuple(sorted(options.items())), self.given, False)

    def recorded(self, chosen: Mapping[str, Option]) -> dict[str, Any]:
        """What a checkpoint keeps of it, ready for JSON; `chosen`: for the program that it trains."""
        return {"rewrites": sorted(self.rewrites), "options": {**chosen, **dict(self.options)}}

    def chosen(self, fitting: Mapping[str, Option]) -> dict[str, Option]:
        """Those of `fitting`, options that suit a program, that nobody else has decided."""
        if not self.chooses:
            return {}
        # The flags of the process are the user's word too.
        flags = set(re.findall(r"--(\w+)", os.environ.get("XLA_FLAGS", "")))
        decided = {*flags, *dict(self.options)}
        return {name: value for name, value in fitting.items() if name not in decided}


DEFAULT = Build()
"""All rewrites, and the options that suit a program."""


def as_texts(options: Mapping[str, Option]) -> dict[str, str | bool]:
    """Options as JAX passes them on: numbers are texts."""
    return {k: v if isinstance(v, str | bool) else str(v) for k, v in options.items()}


def recorded_text(note: Mapping[str, Any]) -> str:
    """What `Build.recorded` returned, in words.

    >>> recorded_text(Build.of().recorded({}))
    'rewrites boundaries, convolutions'
    """
    rewrites = ", ".join(note["rewrites"]) or "none"
    options = ", ".join(f"{name}={value}" for name, value in sorted(note["options"].items()))
    return f"rewrites {rewrites}" + (f"; {options}" if options else "")


def _checked_rewrites(given: object) -> dict[str, bool]:
    names = ", ".join(map(repr, REWRITES))
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise OptionError(
            f"rewrites= is a dict from the name of a rewrite ({names}) to True or False. "
            f"Received: {given!r:.200}."
        )
    unknown = [name for name in given if name not in REWRITES]
    if unknown:
        raise OptionError(
            f"rewrites= has the names {names}. Received: rewrites={{{unknown[0]!r}: ...}}."
        )
    return {
        name: check_flag(f"rewrites[{name!r}]", on, error=OptionError) for name, on in given.items()
    }


def _checked_options(given: object) -> dict[str, Option]:
    if given is None:
        return {}
    plain = isinstance(given, Mapping) and all(
        isinstance(name, str) and isinstance(value, Option) for name, value in given.items()
    )
    if not plain:
        raise OptionError(
            f"compiler_options= is a dict of XLA's options, such as "
            f"{{'xla_gpu_enable_triton_gemm': False}}, with texts, numbers and flags as values. "
            f"Received: {given!r:.200}."
        )
    options: dict[str, Option] = dict(given)  # type: ignore[call-overload]
    if options:
        _try(options)
    return options


def _try(options: Mapping[str, Option]) -> None:
    """Compile the smallest program with these options: XLA alone knows their names and values."""
    lowered = jax.jit(jax.numpy.negative).lower(jax.ShapeDtypeStruct((), "float32"))
    try:
        lowered.compile(as_texts(options))
    except Exception as error:
        said = str(error).splitlines()[0]
        raise OptionError(
            f"compiler_options= are options that this XLA has, by their names in XLA_FLAGS without "
            f"the dashes. Received: {dict(options)!r:.300}. XLA says: {said:.300}"
        ) from None

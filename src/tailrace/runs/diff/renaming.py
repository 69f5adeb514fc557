"""Translation of tensor names between programs, for programs of different front ends."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from tailrace.base.messages import shown
from tailrace.errors import OptionError

Names = Mapping[str, str] | Callable[[str], str]
"""New names by old ones: whole names, or what follows the kind in them; or a function of a name."""

Value = TypeVar("Value")


def renamed(found: Mapping[Any, Value], names: Names | None) -> dict[Any, Value]:
    """The same values under other names; keys are names, or tuples that begin with one.

    >>> renamed({"grad/fc.weight": 1, "activation/fc:add": 2}, {"fc": "d", "fc.weight": "d/kernel"})
    {'grad/d/kernel': 1, 'activation/d:add': 2}
    """
    if names is None:
        return dict(found)
    call = names if callable(names) else _Table(names)
    out: dict[Any, Value] = {}
    came_from: dict[Any, str] = {}
    for key, value in found.items():
        old = key[0] if isinstance(key, tuple) else key
        new = call(old)
        if not isinstance(new, str):
            raise OptionError(f"names gives each name a name. Received: {new!r} for {old!r}.")
        put = (new, *key[1:]) if isinstance(key, tuple) else new
        if put in out:
            raise OptionError(
                f"names gives two tensors of the second one name, {shown(new)!r}: "
                f"{shown(came_from[put])!r} and {shown(old)!r}. Leave one of them out."
            )
        out[put], came_from[put] = value, old
    # A function may return a name as it is; an entry that matches nothing is a typo.
    if isinstance(call, _Table):
        call.check(list(came_from.values()))
    return out


class _Table:
    """Names from a dict; the longest matching entry wins."""

    def __init__(self, names: Mapping[str, str]) -> None:
        # Longest first: `fc.weight` before `fc`, which is its prefix.
        self._names = sorted(names.items(), key=lambda pair: -len(pair[0]))
        self._used: set[str] = set()

    def __call__(self, name: str) -> str:
        kind, _, path = name.partition("/")
        for old, new in self._names:
            if name == old:
                self._used.add(old)
                return new
            # A scope is also a prefix of its operations, scopes and parameters.
            if path == old or (path.startswith(old) and path[len(old)] in "/:#["):
                self._used.add(old)
                return f"{kind}/{new}{path[len(old) :]}"
        return name

    def check(self, there: list[str]) -> None:
        """Refuse entries that match nothing."""
        import difflib

        for old, _ in self._names:
            if old not in self._used:
                paths = dict.fromkeys([*there, *(name.partition("/")[2] for name in there)])
                # Names of two front ends look little alike, so the cutoff is low.
                near = difflib.get_close_matches(old, paths, n=3, cutoff=0.3) or list(paths)[:3]
                raise OptionError(
                    f"names has an entry for {old!r}, and the second has no such tensor. The "
                    f"nearest are: {', '.join(repr(shown(name)) for name in near)}."
                )

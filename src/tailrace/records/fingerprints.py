"""Fingerprints of executions, on the host: 8 bytes for each group of tensors, and a chain of them.

    parameters, optimizer, model_state   as they are after the last step of the execution
    gradients                            of its last step, as the optimizer gets them
    loss, elements                       of all its steps: every loss, and every element consumed
    chain                                of all these, and of all executions before

Each is a digest (`taps/bit_digests.py`). Zero means "not computed".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from tailrace.taps.bit_digests import host_digest, mixed_with

GROUPS = ("parameters", "optimizer", "model_state", "gradients", "loss", "elements")
"""The groups of tensors that have a fingerprint each."""

CHAIN = "chain"

FIELDS = {
    "parameters": "params/",
    "optimizer": "optimizer_state/",
    # A step of the user's own has one state, of which nobody knows what is what.
    "model_state": ("model_state/", "state/"),
}
"""The prefixes of the names of a training state's leaves, by group."""


def group_of(leaf: str) -> str:
    """The group of a leaf of the training state; the loss scale counts as the optimizer's."""
    for group, start in FIELDS.items():
        # With a slash behind it: parameters that are a single array are the leaf "params" itself.
        if f"{leaf}/".startswith(start):
            return group
    return "optimizer"


def state_groups(names: Sequence[str], digests: np.ndarray) -> dict[str, int]:
    """The fingerprints of a state: the digests of its leaves, summed by group."""
    found = dict.fromkeys(FIELDS, 0)
    for name, value in zip(names, digests, strict=True):
        # A sum modulo 2**64 does not depend on the order of leaves; each digest has its leaf's name
        # mixed in.
        group = group_of(name)
        found[group] = (found[group] + int(value)) % 2**64
    return found


def loss_fingerprint(losses: np.ndarray, first_step: int) -> int:
    """The fingerprint of losses [steps, microbatches, replicas], each at its index in the training."""
    # By its index in the training, not in the execution: fingerprints of equal steps then agree,
    # however they were cut into executions.
    per_step = int(np.prod(losses.shape[1:]))
    return host_digest(losses, "loss", first=first_step * per_step)


def elements_fingerprint(digests: np.ndarray, first_step: int) -> int:
    """The fingerprint of consumed elements, from their digests [steps, microbatches, replicas]."""
    flat = digests.reshape(-1)
    first = first_step * int(np.prod(digests.shape[1:]))
    return mixed_with(flat, first + np.arange(flat.size), "elements")


def chained(before: int, groups: Mapping[str, int]) -> int:
    """The chain after an execution: it depends on the one before and on every group."""
    # All groups in a fixed order, absent ones as zero: a chain with and one without a group differ.
    values = [before, *(groups.get(group, 0) for group in GROUPS)]
    array = np.array([value % 2**64 for value in values], np.uint64)
    return mixed_with(array, np.arange(array.size), CHAIN)


class FingerprintLog:
    """The fingerprints of the executions of a fit, in order."""

    COLUMNS = ("first_step", "steps", *GROUPS, CHAIN)

    def __init__(self, rows: Sequence[tuple[int, ...]] = ()) -> None:
        self._rows = list(rows)

    def add(self, first_step: int, steps: int, groups: Mapping[str, int]) -> int:
        """Append an execution; returns the chain after it."""
        chain = chained(self._rows[-1][-1] if self._rows else 0, groups)
        values = (groups.get(group, 0) for group in GROUPS)
        self._rows.append((first_step, steps, *values, chain))
        return chain

    def arrays(self) -> dict[str, np.ndarray]:
        """The columns by name."""
        columns = zip(*self._rows, strict=True) if self._rows else ((),) * len(self.COLUMNS)
        return {
            name: np.array(values, np.int64 if name in ("first_step", "steps") else np.uint64)
            for name, values in zip(self.COLUMNS, columns, strict=True)
        }

    @classmethod
    def of(cls, arrays: Mapping[str, np.ndarray]) -> FingerprintLog:
        """A log from the result of `arrays`."""
        columns = [[int(value) for value in arrays[name]] for name in cls.COLUMNS]
        return cls(list(zip(*columns, strict=True)))

    def __len__(self) -> int:
        return len(self._rows)

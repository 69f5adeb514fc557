"""Layers of a module that draw random numbers while it trains."""

from __future__ import annotations

import torch

from tailrace.base.messages import note_once

_DROPOUTS = (
    torch.nn.Dropout,
    torch.nn.Dropout1d,
    torch.nn.Dropout2d,
    torch.nn.Dropout3d,
    torch.nn.AlphaDropout,
    torch.nn.FeatureAlphaDropout,
)
_WITH_DROPOUT = (torch.nn.MultiheadAttention, torch.nn.RNNBase)


def random_layers(module: torch.nn.Module) -> list[str]:
    """The names of layers with dropout.

    >>> random_layers(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout(0.5)))
    ['1']
    """
    return [name for name, inner in module.named_modules() if _draws(inner)]


def _draws(module: torch.nn.Module) -> bool:
    if isinstance(module, _DROPOUTS):
        return bool(module.p)
    return isinstance(module, _WITH_DROPOUT) and bool(module.dropout)


def note_what_is_lacking(module: torch.nn.Module) -> None:
    """Log what training that resumes from a `state_dict` lacks."""
    found = random_layers(module)
    if found:
        note_once(
            f"A state_dict has no step count and no seed: dropout ({found[0]!r}) draws other masks "
            f"than training that was not interrupted. model.save(path) and model.load(path) keep both.",
            key=f"state_dict without seed {found[0]}",
        )

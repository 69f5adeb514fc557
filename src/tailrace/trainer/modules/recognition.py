"""Which library a model comes from, found without importing any.

A module can belong to a library only if that library is loaded already, so an entry of
the table is asked only when its module is in `sys.modules`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from tailrace.base.trees import Tree
from tailrace.errors import PipelineError
from tailrace.pipeline.pipeline import Pipeline
from tailrace.trainer.modules.binding import Binding, Plain
from tailrace.trainer.modules.stages import StagesBinding, pipeline_of_module


def bind(loss_fn: Callable[..., Any], params: Tree, model_state: Tree) -> tuple[Binding, Any]:
    """The binding for the object given as parameters, and the engine's loss function.

    >>> bind(len, {"w": 1.0}, None)[0].params
    {'w': 1.0}
    """
    # Stages first: a list of modules is also a tree of them, which Equinox and NNX take as one model.
    pipeline = loss_fn if isinstance(loss_fn, Pipeline) else None
    if pipeline is not None and _fits(pipeline, params) and _fits(pipeline, model_state or params):
        stages = StagesBinding(pipeline, params, model_state, bind_one)
        if stages.are_modules:
            return stages, stages.loss(pipeline)
    binding = bind_one(params, model_state)
    if pipeline is None or isinstance(binding, Plain):
        return binding, binding.loss(loss_fn)
    if pipeline.stages:
        raise PipelineError(
            "The modules of a pipeline are a list with one for each stage, with a list in it for "
            f"concurrent stages. The stages: {pipeline.sizes}. Received: a {type(params).__name__}"
            + (f" of {len(params)}." if isinstance(params, list | tuple) else ".")
        )
    return binding, pipeline_of_module(binding, pipeline)


def bind_one(params: Tree, model_state: Tree) -> Binding:
    """The binding of one model."""
    for name, binding in _LIBRARIES:
        if name in sys.modules and (found := binding(params, model_state)) is not None:
            return found
    return Plain(params, model_state)


def without_values(leaf: object) -> str | None:
    """What holds no parameters though its library's models do, and what to give instead.

    >>> without_values("a text") is None
    True
    """
    made: type = leaf if isinstance(leaf, type) else type(leaf)
    is_class, name = made is leaf, made.__name__
    if _is_of("flax.linen", made):
        what = f"the Linen class {name}" if is_class else f"a Linen module, {name}"
        model = f"{name}(...)" if is_class else "model"
        return (
            f"{what}. Linen modules hold no values: give the variables that {model}.init(key, x) "
            f"returns, and call model.apply in the loss function."
        )
    for library, title, arguments in (
        ("flax.nnx", "NNX", "..., rngs=nnx.Rngs(0)"),
        ("equinox", "Equinox", "..., key=key"),
    ):
        if is_class and _is_of(library, made):
            return f"the {title} class {name}. Give an instance of it: {name}({arguments})."
    return None


def _is_of(library: str, made: type) -> bool:
    """Whether a class is a module's of a library, which must be loaded for that."""
    return library in sys.modules and issubclass(made, sys.modules[library].Module)


def _fits(pipeline: Pipeline, tree: Tree) -> bool:
    """Whether a tree has an entry for each member of each stage."""
    if not isinstance(tree, list | tuple) or not len(tree) == len(pipeline.stages) > 0:
        return False
    return all(
        len(members) == 1 or (isinstance(entry, list | tuple) and len(entry) == len(members))
        for members, entry in zip(pipeline.stages, tree, strict=True)
    )


def _nnx(params: Tree, model_state: Tree) -> Binding | None:
    from flax import nnx

    from tailrace.trainer.modules.nnx_modules import NnxBinding, recognised
    from tailrace.trainer.modules.nnx_states import NnxStateBinding

    if isinstance(params, nnx.State):
        return NnxStateBinding(params, model_state)
    return NnxBinding(params, model_state) if recognised(params) else None


def _linen(params: Tree, model_state: Tree) -> Binding | None:
    from tailrace.trainer.modules.linen_variables import LinenBinding, recognised

    return LinenBinding(params, model_state) if recognised(params) else None


def _equinox(params: Tree, model_state: Tree) -> Binding | None:
    from tailrace.trainer.modules.equinox_modules import EquinoxBinding, recognised

    return EquinoxBinding(params, model_state) if recognised(params) else None


def _lookahead(params: Tree, model_state: Tree) -> Binding | None:
    from optax import LookaheadParams

    from tailrace.trainer.modules.lookahead_params import LookaheadBinding

    return LookaheadBinding(params, model_state) if isinstance(params, LookaheadParams) else None


# Linen last: its variables are plain dicts, which say least about their origin.
_LIBRARIES: tuple[tuple[str, Callable[[Any, Any], Binding | None]], ...] = (
    ("optax", _lookahead),
    ("flax.nnx", _nnx),
    ("equinox", _equinox),
    ("flax.linen", _linen),
)
"""(module, binding): the binding is None where the model is not one of that library."""

"""The pages about names have everything that is here, and nothing that is not."""

import importlib
import inspect
import pathlib
import re

import pytest

from tailrace.compat import ipu

GUIDES = pathlib.Path(__file__).parents[2] / "docs" / "guides"
PAGE = (GUIDES / "moving.md").read_text()
LIST = (GUIDES / "originals_names.md").read_text()
ROW = re.compile(r"^\| (?P<names>.+?) \| (?P<verdict>works|differs|noted|refused) \|", re.MULTILINE)

MODULES = [
    "config",
    "dataset_benchmark",
    "eager.backprop",
    "gradient_accumulation",
    "ipu_compiler",
    "ipu_infeed_queue",
    "ipu_outfeed_queue",
    "loops",
    "ops.all_to_all_op",
    "ops.control_flow_ops",
    "ops.cross_replica_ops",
    "ops.embedding_ops",
    "ops.functional_ops",
    "ops.grad_util_ops",
    "ops.internal_ops",
    "ops.math_ops",
    "ops.nn_ops",
    "ops.pipelining_ops",
    "ops.rand_ops",
    "ops.reduce_scatter_op",
    "ops.replication_ops",
    "optimizers.automatic_loss_scaling_optimizer",
    "optimizers.cross_replica_optimizer",
    "optimizers.gradient_accumulation_optimizer",
    "optimizers.ipu_optimizer",
    "optimizers.map_gradient_optimizer",
    "optimizers.sharded_optimizer",
    "scopes",
    "utils",
]
"""The modules that have the original's names."""

OURS = {
    "AttributeMetadata",
    "CategoryError",
    "ConfigurationError",
    "CompiledOp",
    "Enqueued",
    "IPUOutfeedQueueIterator",
    "NeedsNumber",
    "Optimizer",
    "arguments_of",
    "as_count",
    "check_dtype",
    "check_ordinal",
    "check_sharding",
    "current",
    "current_ordinal",
    "group",
    "ordinal_of",
    "replicas",
    "shards_of",
}
"""What those modules have besides."""


def defined_in(name):
    module = importlib.import_module(f"tailrace.compat.ipu.{name}")
    for attribute, value in vars(module).items():
        if attribute.startswith("_") or not (inspect.isclass(value) or inspect.isfunction(value)):
            continue
        if value.__module__ == module.__name__ and attribute not in OURS:
            yield attribute


@pytest.mark.parametrize("module", MODULES)
def test_every_name_is_in_the_list(module):
    missing = [name for name in defined_in(module) if name not in LIST]
    assert not missing


def test_names_on_the_page_are_here():
    found = 0
    for row in ROW.finditer(PAGE):
        for name in re.findall(r"`([a-z_]+(?:\.\w+)+)`", row["names"]):
            if row["verdict"] == "refused" or name.startswith("ipu.keras"):
                continue
            value = ipu
            for part in name.removeprefix("ipu.").split("."):
                if part != "keras":
                    value = getattr(value, part)
            found += 1
    assert found >= 15  # the page has only names that differ; all are in the list

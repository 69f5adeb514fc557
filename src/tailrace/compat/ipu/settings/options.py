"""Every option of an `IPUConfig`, declared once: types, default, meaning."""

from typing import Any

from tailrace.compat.ipu.settings.choices import (
    DeviceConnectionType,
    MergeRemoteBuffersBehaviour,
    SchedulingAlgorithm,
    SelectionOrder,
    StochasticRoundingBehaviour,
)
from tailrace.compat.ipu.settings.config_tree import Option

# One number, or one for each logical device.
_COUNTS = (int, list, tuple)


def _flag(doc: str, default: bool = False) -> Option:
    return Option((bool,), default, doc)


def _number(doc: str, default: int = 0) -> Option:
    return Option((int,), default, doc)


def _passed_on(what: str) -> Option:
    return Option((dict,), {}, f"Options that the original passed on to its compiler for {what}.")


OPTIONS: dict[str, Any] = {
    "auto_select_ipus": Option(
        _COUNTS,
        [],
        "How many devices there are: one logical device for each entry. []: one with one device.",
        only_there=False,
    ),
    "select_ipus": Option(
        _COUNTS,
        [],
        "Which devices there are, by number: one logical device for each entry.",
        only_there=False,
    ),
    "selection_order": Option(
        (SelectionOrder,),
        SelectionOrder.AUTO,
        "The order in which devices are taken.",
        only_there=False,
    ),
    "allow_recompute": Option(
        (bool,),
        False,
        "Whether pipelines compute activations again in their backward pass.",
        only_there=False,
    ),
    "serialization_output_folder": Option(
        (str,), "", "Where executables for servers were written."
    ),
    "compilation_poplar_options": _passed_on("every program"),
    "gcl_poplar_options": _passed_on("collectives"),
    "convolutions": {"poplar_options": _passed_on("convolutions")},
    "device_connection": {
        "version": Option((str,), "", "The version of the hardware to compile for."),
        "type": Option(
            (DeviceConnectionType,), DeviceConnectionType.ALWAYS, "When devices are attached."
        ),
        "enable_remote_buffers": _flag("Whether remote memory may be used."),
    },
    "experimental": {
        "always_rearrange_copies_on_the_host": _flag("Where data was rearranged."),
        "enable_remote_buffer_embedding": _flag("Whether embeddings were in remote memory."),
        "enable_prng_stability": _flag("Whether replicas drew equal random numbers."),
        "multi_replica_distribution": {
            "process_count": _number("How many processes share the replicas."),
            "process_index": _number("Which of them this is."),
        },
    },
    "floating_point_behaviour": {
        "inv": _flag("Stop at invalid operations."),
        "div0": _flag("Stop at divisions by zero."),
        "oflo": _flag("Stop at overflows."),
        "nanoo": _flag("Make NaN of overflows."),
        "esr": Option(
            (StochasticRoundingBehaviour, bool),
            StochasticRoundingBehaviour.OFF,
            "Stochastic rounding.",
        ),
        "set_all": _flag("All of these."),
    },
    "io_tiles": {
        "num_io_tiles": _number("How many tiles move data only."),
        "place_ops_on_io_tiles": _flag("Whether operations are placed there."),
        "available_memory_proportion": Option((float,), 0.9, "How much of their memory is used."),
    },
    "ipu_model": {
        "compile_ipu_code": _flag("Whether the simulator compiles.", True),
        "tiles_per_ipu": _number("How many tiles the simulator has."),
        "version": Option((str,), "ipu2", "Which chip is simulated."),
    },
    "matmuls": {
        "clear_pass_type": _flag("Whether passes are planned alike."),
        "poplar_options": _passed_on("matrix products"),
    },
    "norms": {
        "use_stable_statistics": _flag("Whether variances are computed in two passes."),
        "experimental": {
            "distributed_batch_norm_replica_group_size": _number(
                "Over how many replicas batch norm statistics are taken.", 1
            )
        },
    },
    "optimizations": {
        "math": {
            "fast": _flag("Whether mathematics may be inexact."),
            "dot_strength": _flag("Whether matrix products are simplified.", True),
        },
        "prefetch_data_streams": _flag("Whether feeds are read ahead.", True),
        "combine_embedding_lookups": _flag("Whether lookups are merged."),
        "combine_matmuls": _flag("Whether matrix products are merged."),
        "enable_graph_outlining": _flag("Whether code is shared.", True),
        "merge_infeed_io_copies": _flag("Whether copies of feeds are merged.", True),
        "maximum_cross_replica_sum_buffer_size": _number("The most bytes of one reduction."),
        "maximum_reduce_scatter_buffer_size": _number("The most bytes of one scattered reduction."),
        "maximum_inter_ipu_copies_buffer_size": _number("The most bytes of one copy."),
        "maximum_send_recv_cluster_size": _number("The most bytes of one transfer."),
        "maximum_reduce_many_buffer_size": _number("The most bytes of merged reductions."),
        "maximum_all_gather_buffer_size": _number("The most bytes of one gathering."),
        "minimum_remote_tensor_size": _number("The fewest bytes worth offloading.", 128),
        "merge_remote_buffers": Option(
            (MergeRemoteBuffersBehaviour,),
            MergeRemoteBuffersBehaviour.IF_BENEFICIAL,
            "Whether buffers in remote memory are merged.",
        ),
        "enable_gather_simplifier": _flag("Whether gathers are simplified."),
        "triangular_solve_expander_block_size": _number("The block size of triangular solves."),
        "cholesky_block_size": _number("The block size of Cholesky decompositions."),
        "enable_fast_math": Option((bool,), False, "Use optimizations.math.fast.", deprecated=True),
    },
    "pooling": {"poplar_options": _passed_on("pooling")},
    "scheduling": {
        "algorithm": Option(
            (SchedulingAlgorithm,),
            SchedulingAlgorithm.CHOOSE_BEST,
            "How operations are ordered.",
        ),
        "maximum_scheduler_lookahead_depth": _number("How far the scheduler looks.", 5),
        "maximum_scheduler_search_space_size": _number("How many orders it tries.", 64),
    },
    "slices": {"poplar_options": _passed_on("slices")},
}

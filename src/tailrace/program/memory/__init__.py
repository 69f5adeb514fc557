"""Placement of optimizer state and activations: on the device, sharded, or offloaded to the host.

In: the shapes of parameters and optimizer state, and the user's options.
Out: `StateKeeping` (where each leaf is held), `HeldUpdate` (the update from there), `HeldActivations`.

    optimizer_state              decides for each leaf; places leaves, and makes them whole again
    state_update, update_graph   the update, computed part by part and shard by shard
    sharded_state, host_memory   cutting and gathering; moves between memories, and their order
    first_state                  the initial state, leaf by leaf
    activation_offload           the forward pass in parts; offload_segments cuts it, layer_loops
                                 offloads what loops carry

Rules: results are those of the plain step. `trainer/costs/memory_plan.py` chooses the
options; this package carries them out. A move between memories is a mark, and the running program
resolves it: only `Moves` knows how.
"""

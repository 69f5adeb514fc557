"""The only package that knows JAX's internals: versions, primitives, and traced programs (jaxprs).

In: a user's function, traced by JAX. Out: objects with named parts (loops, calls, marks, stretches of
equations) that other packages read, and functions that emit a changed program. Everything here is pure:
no module keeps state about a program, and none runs one on a device.

Rules. Only `internals` imports `jax.extend` or `jax.interpreters` and branches on JAX's version. Only
this package reads `eqn.params`. Other packages see equations through `control`, `operations`,
`own_equations` and `visitor`; they create them through `marks`.

internals           JAX below its public API, and differences between versions; jax_seams probes it
marks               our primitives, and the trace they are emitted into; own_equations reads them
control             loops, branches and calls as objects, and emitting them again
operations          properties of single operations; flops counts them
array_trees         checks that what users pass is a tree of arrays
walk                every equation with its position and surroundings
visitor             the traversal of a program through loops, branches and calls
value_graph         producers and users of values as XLA sees them; free_numbers asks it which literals
                    can be arguments
stretches           live-ins and live-outs of consecutive equations, and running them
recording           operations that run eagerly, recorded so that they can be differentiated
replica_reductions  sums and means over replicas
convolutions        convolutions in the form that is fastest on a CPU
"""

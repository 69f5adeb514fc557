"""The only room that knows the inside of JAX: versions, marks in traced programs, reading of programs.

internals       JAX below its public surface, and differences between versions; jax_seams probes it
marks           our own equations, and the trace they are made in; own_equations reads them
control         loops, branches and calls as objects, and emitting them again
operations      what single operations do
walk            every equation with its position and surroundings
visitor         following a program through loops, branches and calls
recording       operations that run one by one, kept so that they can be differentiated
stretches       what some equations read and make, and running them
convolutions    convolutions in the form that is fastest on a CPU
"""

"""From a `torch.nn.Module` to a JAX function.

In: a module. Out: a pure function of parameters, buffers, arrays and a key, with names.
Rule: a module is called only in `module_function`, through torchax; `watch` intercepts every function
that it calls.
"""

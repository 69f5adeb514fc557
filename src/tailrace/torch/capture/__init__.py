"""From a PyTorch module to a JAX function, by PyTorch's own front end for compilers.

    module(*args) ──Dynamo──▶ graph of torch functions ──▶ what autograd knows, written into it
                  ──AOTAutograd──▶ graph of core ATen, functional ──lowerings──▶ JAX

Rule: what is private in Dynamo and AOTAutograd is used in `internals` only, which has the probes.
"""

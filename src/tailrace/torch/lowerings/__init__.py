"""PyTorch's operations in JAX: what a captured graph is evaluated by.

In: a functional graph of core ATen operations, and JAX values. Out: JAX values. Importing this
registers all lowerings.

    table             which function computes which operation
    promotion         in which dtype PyTorch computes
    random_numbers    what draws, from keys of its own
    aten/             ATen operations, by kinds
    attention         the form that runs, by shapes, dtypes and device
    composites        operations of our own, which stay whole in a graph; what is decomposed
    evaluate          a graph, evaluated

Rule: a lowering returns PyTorch's shapes, dtypes (64 bits are 32 on the device) and values, and has its
gradient, also where a plain formula would have another one or NaN.
"""

from tailrace.torch.lowerings import composites as composites
from tailrace.torch.lowerings.aten import activations as activations
from tailrace.torch.lowerings.aten import arithmetic as arithmetic
from tailrace.torch.lowerings.aten import backwards as backwards
from tailrace.torch.lowerings.aten import convolutions as convolutions
from tailrace.torch.lowerings.aten import effects as effects
from tailrace.torch.lowerings.aten import fourier as fourier
from tailrace.torch.lowerings.aten import functions as functions
from tailrace.torch.lowerings.aten import indexing as indexing
from tailrace.torch.lowerings.aten import losses as losses
from tailrace.torch.lowerings.aten import matrices as matrices
from tailrace.torch.lowerings.aten import new_arrays as new_arrays
from tailrace.torch.lowerings.aten import normalisations as normalisations
from tailrace.torch.lowerings.aten import ordering as ordering
from tailrace.torch.lowerings.aten import pools as pools
from tailrace.torch.lowerings.aten import reductions as reductions
from tailrace.torch.lowerings.aten import resizing as resizing
from tailrace.torch.lowerings.aten import shapes as shapes

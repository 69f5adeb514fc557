"""Train and observe PyTorch modules on the device: `import tailrace.torch as tt`.

A module's forward and backward pass, accumulation and update become one device program, through
torchax; a call runs many steps of it. Importing this does not start JAX.

In: a `torch.nn.Module`, an optimizer, and tensors. Out: tensors, and weights copied back on demand.

    models      `tt.training_model` and `tt.inference_model`, and synchronisation with the host
    calls       inputs, options, loaders and outputs of a call
    programs    device programs of a call
    tracing     from a module to a JAX function
    capture     the same by PyTorch's front end for compilers, for modules that cannot be traced
    lowerings   ATen operations in JAX, and graphs of them evaluated
    torchax     operators and behaviour of PyTorch that torchax lacks
    optim       optimizers, schedules
    resuming    checkpoints of a training whose loop is the user's own

Rules. Core packages never import this one. Undocumented parts of torch and torchax are used only in
`torchax` and `torch_internals`.
"""

from tailrace.torch.torchax.versions import check_installed as _check_installed

_check_installed()

from tailrace.torch import optim as optim  # noqa: E402
from tailrace.torch.calls.containers import register_container as register_container  # noqa: E402
from tailrace.torch.calls.loader import DataLoader as DataLoader  # noqa: E402
from tailrace.torch.calls.loader import DataLoaderMode as DataLoaderMode  # noqa: E402
from tailrace.torch.calls.options import ModelOptions as ModelOptions  # noqa: E402
from tailrace.torch.calls.output_modes import OutputMode as OutputMode  # noqa: E402
from tailrace.torch.models.factory import inference_model as inference_model  # noqa: E402
from tailrace.torch.models.factory import training_model as training_model  # noqa: E402
from tailrace.torch.models.inference import InferenceModel as InferenceModel  # noqa: E402
from tailrace.torch.models.training import TrainingModel as TrainingModel  # noqa: E402
from tailrace.torch.tracing.as_function import as_function as as_function  # noqa: E402
from tailrace.torch.tracing.blocks import BeginBlock as BeginBlock  # noqa: E402
from tailrace.torch.tracing.blocks import Block as Block  # noqa: E402
from tailrace.torch.tracing.blocks import BlockFunction as BlockFunction  # noqa: E402
from tailrace.torch.tracing.blocks import module_repr as module_repr  # noqa: E402
from tailrace.torch.tracing.blocks import recomputation_checkpoint as recomputation_checkpoint  # noqa: E402
from tailrace.torch.tracing.blocks import remove_blocks as remove_blocks  # noqa: E402
from tailrace.torch.tracing.losses import identity_loss as identity_loss  # noqa: E402
from tailrace.torch.tracing.printing import print_tensor as print_tensor  # noqa: E402

"""Anchor tensors: find their names, say which are wanted, read them after each call.

Written for PopTorch; only the import is another.
"""

import torch
from digits_model import BasicLinearModel

from tailrace.compat import poptorch


def main():
    torch.manual_seed(0)
    input, label = torch.rand(10, 1, 28, 28), torch.randint(0, 10, (10,))
    model = BasicLinearModel()
    model.train()
    poptorch_model = poptorch.trainingModel(model)
    poptorch_model(input, label)
    tensor_names = poptorch_model.getTensorNames()
    print(f"{len(tensor_names)} tensors, among them:")
    for name in tensor_names:
        if "fc2" in name:
            print(f"  {name}")
    poptorch_model.destroy()

    opts = poptorch.Options()
    opts.anchorTensor("grad_bias", "Gradient___model.fc2.bias")
    opts.anchorTensor("update_weight", "UpdatedVar___model.fc2.weight")
    poptorch_model = poptorch.trainingModel(model, opts)
    poptorch_model(input, label)
    grad = poptorch_model.getAnchoredTensor("grad_bias")
    update = poptorch_model.getAnchoredTensor("update_weight")
    print(f"gradient of the bias: {tuple(grad.shape)}, norm {grad.norm():.4f}")
    print("updated weight is the module's:", torch.equal(update, model.fc2.weight))


if __name__ == "__main__":
    main()

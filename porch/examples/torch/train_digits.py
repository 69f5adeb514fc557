"""Train on the device, many steps a call, watch gradients, then predict: the native front end.

After each epoch the state is saved (`model.load` goes on from there); the run directory keeps the norms
of gradients, of which a picture is drawn.
"""

import argparse
import pathlib
import tempfile

import torch
from digits_model import BasicLinearModel, digits

import tailrace as tr
import tailrace.torch as tt


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=40)
    parser.add_argument("--device-iterations", type=int, default=50)
    parser.add_argument("--folder", help="where run, saved states and picture go")
    arguments = parser.parse_args()
    folder = pathlib.Path(arguments.folder or tempfile.mkdtemp())
    torch.manual_seed(0)
    module = BasicLinearModel()
    module.log_softmax = torch.nn.LogSoftmax(dim=1)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.02, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, arguments.epochs)
    model = tt.training_model(
        module,
        optimizer,
        device_iterations=arguments.device_iterations,
        observe=[tr.Tap("grad/*.weight", mode="final", reduce="norm")],
        run_dir=folder / "run",
    )
    loader = tt.DataLoader(model, digits(), arguments.batch_size, shuffle=True)
    for epoch in range(arguments.epochs):
        for images, labels in loader:
            model(images, labels)
        schedule.step()
        model.save(folder / f"epoch{epoch}.npz")
    print(f"loss {model.history.loss[-1]:.4f} after {model.history.steps[-1] + 1} steps")
    for name in model.records.names:
        if name.startswith("grad/"):
            print(f"  {name}: {model.records[name, 'norm'].values[-1]:.4f}")

    tr.open_run(folder / "run").heatmap("grad/*").save(folder / "gradients.png")
    module.eval()
    images, labels = digits("test").tensors
    predicted = tt.inference_model(module, device_iterations=10)(images)
    accuracy = (predicted.argmax(1) == labels).float().mean()
    print(f"accuracy {accuracy:.1%} on {len(labels)} digits")


if __name__ == "__main__":
    main()

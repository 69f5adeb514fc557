"""`tt.training_model` and `tt.inference_model`: the objects that users hold.

In: a module, an optimizer and options. Out: an object that is called like the module.
Rule: `host_sync` decides what changed on the host since the last call. Models own programs
(`torch.programs`), and training programs own an engine.
"""

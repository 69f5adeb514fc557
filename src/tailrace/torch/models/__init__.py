"""`tt.training_model` and `tt.inference_model`: what a user holds."""

"""What we know of torch and torchax beyond their public interface."""

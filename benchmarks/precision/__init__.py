"""The precision benchmark: what is half, what is kept, how far gradients are off, on unmodified models."""

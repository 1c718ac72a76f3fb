"""The step-time benchmark: seconds and memory of whole train steps, beside the peers and PyTorch."""

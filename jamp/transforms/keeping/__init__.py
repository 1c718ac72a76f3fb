"""What reverse mode keeps between the forward and the backward pass, and where checkpoints begin and end."""

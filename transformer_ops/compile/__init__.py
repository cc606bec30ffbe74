"""What torch.compile sees of a call: plain tensors, constants, and one node for Python steps."""

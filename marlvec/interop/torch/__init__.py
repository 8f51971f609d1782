"""PyTorch policies."""

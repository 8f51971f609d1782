"""Storage of rows until a batch takes them."""

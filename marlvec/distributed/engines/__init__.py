"""Where collectors run: here, or as actors of a Ray cluster."""

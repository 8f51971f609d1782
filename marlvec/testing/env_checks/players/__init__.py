"""A player for each form of env."""

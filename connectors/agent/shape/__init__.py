"""Connectors that change the shape or the structure of observations."""

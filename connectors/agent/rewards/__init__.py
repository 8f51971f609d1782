"""Connectors that change rewards."""

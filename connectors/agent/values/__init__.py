"""Connectors that change the values of observations."""

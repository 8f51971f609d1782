"""Connectors for images."""

"""Connectors that hold rows back."""

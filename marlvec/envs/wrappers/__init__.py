"""Wrappers of one env: time limits, padding, recordings."""

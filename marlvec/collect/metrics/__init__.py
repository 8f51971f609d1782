"""Metrics of a collector."""

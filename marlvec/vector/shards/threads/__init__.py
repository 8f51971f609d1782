"""Threads that share one call's work."""

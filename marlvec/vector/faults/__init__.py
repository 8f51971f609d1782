"""Handling of envs and workers that fail: failures, restarts, recovery."""

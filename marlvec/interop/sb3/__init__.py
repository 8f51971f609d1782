"""Stable-Baselines3 over marlvec's envs."""

"""Schedulers: which envs step together."""

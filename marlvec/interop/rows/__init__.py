"""Shared code of row views, which have one row per agent of an env."""

"""Saving and loading: values, spaces, names and the archive format."""

"""Saving and loading: values, spaces, names and the one archive format."""

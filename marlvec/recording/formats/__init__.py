"""Recordings to and from the datasets of other libraries, a module a library."""

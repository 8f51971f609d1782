"""Implementation of the commands, one module each."""

"""The state of a collector as plain data."""

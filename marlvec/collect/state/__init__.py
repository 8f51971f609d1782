"""What a collector is in the middle of, as plain data."""

"""State of many collectors, as plain data."""

"""What many collectors are in the middle of, as plain data."""

"""Results of matches."""

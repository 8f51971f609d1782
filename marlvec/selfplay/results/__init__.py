"""What matches came to."""

"""What was collected, in figures."""

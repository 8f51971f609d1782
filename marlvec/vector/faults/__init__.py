"""What happens when an env or a worker fails: failures, restarts, recovery."""

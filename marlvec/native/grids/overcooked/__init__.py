"""overcooked-ai's gridworld, compiled."""

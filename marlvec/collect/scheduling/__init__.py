"""Which envs are stepped together."""

"""Grid envs of multi-agent papers, with the same numbers as their references."""

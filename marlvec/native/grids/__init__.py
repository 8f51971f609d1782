"""Grid envs that papers on several agents run on, with the same numbers as their references."""

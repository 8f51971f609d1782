"""Grid envs of other libraries: their ids, and what an env needs to run as its authors meant it."""

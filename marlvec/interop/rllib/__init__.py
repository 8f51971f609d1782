"""RLlib over marlvec's envs: runner, vector env, env, connector."""

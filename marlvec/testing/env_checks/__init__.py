"""The parts of `marlvec.testing.check_env`: a player per form of env, and what is checked of every value."""

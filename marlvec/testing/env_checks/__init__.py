"""Parts of `marlvec.testing.check_env`: a player per form of env, and checks of single values."""

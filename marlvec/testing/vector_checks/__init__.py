"""The parts of `marlvec.testing.check_vector_env`: how whole episodes are played, and one module per kind of check."""

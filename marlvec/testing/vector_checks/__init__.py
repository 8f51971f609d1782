"""Parts of `marlvec.testing.check_vector_env`: playing whole episodes, and one module per kind of check."""

"""Checks of `marlvec.testing.check_connector` on sampled episodes, one module per kind of check."""

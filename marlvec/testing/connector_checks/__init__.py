"""What `marlvec.testing.check_connector` checks on sampled episodes, one module for each kind of check."""

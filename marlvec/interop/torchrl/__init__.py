"""TorchRL over marlvec's envs."""

"""What runs a contiguous slice of the envs: one by one, in kernels, in a pool."""

"""marlvec's envs for other libraries: one module or folder per library, imported only on use."""

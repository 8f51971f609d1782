"""The scenarios of mpe2, one module an env id."""

"""What `check_native_env` is made of."""

"""Parts of `check_native_env`."""

"""Worker processes: starting, speaking to, watching and ending them."""

"""Worker processes: starting them, messages, time limits, ending them."""

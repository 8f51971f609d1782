"""The thread that writes a recording."""

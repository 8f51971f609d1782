"""A collector where it runs, and the messages to it and from it."""

"""A collector's server, and the messages to it and from it."""

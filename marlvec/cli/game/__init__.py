"""A person plays: what the game looks like, and how a move is given."""

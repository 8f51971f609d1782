"""Actions that no policy chose: given from outside, or of agents that are idle."""

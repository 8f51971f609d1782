"""Connectors that add what an agent should know: who it is, its team, the time, what it may do."""

"""Connectors that remember: earlier observations, actions, rewards, states."""

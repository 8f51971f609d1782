"""Opponents, the pool that keeps them, and rules for when they join and leave."""

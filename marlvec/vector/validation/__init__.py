"""Checks of actions, observations and rewards against their spaces."""

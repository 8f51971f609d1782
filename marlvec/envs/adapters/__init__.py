"""Adapters from users' envs to `MultiAgentEnv`, one module for each API."""

"""Adapters: what brings users' envs to `MultiAgentEnv`, one module a family."""

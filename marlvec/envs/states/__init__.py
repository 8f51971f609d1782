"""States of users' envs as plain data: what an env says itself, or the attributes of its layers."""

"""States of users' envs as plain data: from an env's own methods, or from the attributes of its layers."""

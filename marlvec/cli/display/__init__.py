"""Output of commands: tables and plots."""

"""What the checks of connectors are made of."""

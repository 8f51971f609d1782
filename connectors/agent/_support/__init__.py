"""What agent connectors are made of."""

"""What connectors are made of: tables per agent, histories, moments, draws per row, leaves, shifts, declared spaces."""

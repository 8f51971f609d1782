"""What connectors are made of: tables per agent, draws per row, shifts, leaf spaces."""

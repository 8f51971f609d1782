"""Parts of connectors: tables per agent, histories, moments, random draws per row, leaves, shifts, declared spaces."""

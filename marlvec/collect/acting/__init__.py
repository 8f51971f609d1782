"""From observations to actions: policies, their connectors, and which agents each plays."""

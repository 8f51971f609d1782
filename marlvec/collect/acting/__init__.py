"""From observations to actions: policies, their connectors, and who plays whom."""

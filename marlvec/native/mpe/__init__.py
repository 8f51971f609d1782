"""mpe2's particle envs: one file a scenario, on one physics core."""

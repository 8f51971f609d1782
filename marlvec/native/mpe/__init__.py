"""mpe2's particle worlds: one file a scenario, on one physics core."""

"""PettingZoo's pursuit, compiled."""

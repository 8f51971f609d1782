"""Simulators that drive from outside."""

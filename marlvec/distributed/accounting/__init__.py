"""Accounting of requests: what was requested, delivered and lost, and what may be requested next."""

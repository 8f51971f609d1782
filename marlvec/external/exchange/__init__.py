"""Rows that wait for an answer, and the episodes that they belong to."""

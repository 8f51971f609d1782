"""Engines that run collectors: in this process, or as actors of a Ray cluster."""

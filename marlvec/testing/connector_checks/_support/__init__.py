"""Support for the checks of connectors."""

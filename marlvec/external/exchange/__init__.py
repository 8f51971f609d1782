"""External episodes, and the queue of rows that wait for the collector."""

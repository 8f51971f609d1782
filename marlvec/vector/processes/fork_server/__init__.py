"""The fork server: one small process that forks workers, so that a threaded parent is never forked."""

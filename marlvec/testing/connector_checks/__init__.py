"""What `marlvec.testing.check_connector` asks of a connector: a story of rows, and one room per kind of question."""

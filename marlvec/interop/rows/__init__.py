"""What views of rows (one row an agent of an env) share."""

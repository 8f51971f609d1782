"""The columns of rows and batches: which there are, and what each must be like."""

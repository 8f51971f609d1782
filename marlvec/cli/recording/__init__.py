"""Commands that record datasets and show what is in them."""

"""From what a user gives to `make()` to a built env: ids, factories, recipes."""

"""From the arguments of `make()` to a built env: ids, factories, recipes."""

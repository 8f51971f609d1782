"""Small poker games of two players, by OpenSpiel's rules: Kuhn and Leduc."""

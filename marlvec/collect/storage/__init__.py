"""Where rows stay until a batch takes them."""

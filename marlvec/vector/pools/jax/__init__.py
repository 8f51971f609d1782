"""JAX worlds as pools: `world` is the protocol, `pool` runs N of them in one jitted call, the rest are suites."""

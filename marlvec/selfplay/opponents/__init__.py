"""Who a learner plays against: opponents, the pool that keeps them, when one joins and leaves."""

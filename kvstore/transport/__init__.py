"""Ways to move block bytes between a worker and a store; `base` has the contract."""

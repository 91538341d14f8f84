"""Models that stand for real ones, or change how one behaves, and a fake draft channel: for tests,
benchmarks and demonstrations. They ship with the package; nothing that serves imports them (a
contract in pyproject.toml)."""

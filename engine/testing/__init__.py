"""Models that replace real ones, or change how one behaves, and a fake draft channel, for tests,
benchmarks and demonstrations. They are part of the package; no serving code imports them (a
contract in pyproject.toml)."""

"""Substitutes for hardware in complete workers, for tests, benchmarks and demonstrations."""

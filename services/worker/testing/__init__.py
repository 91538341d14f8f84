"""What stands in for hardware in whole workers: for tests, benchmarks and demonstrations."""

"""What the benchmarks share: reading a profiler's trace, and the limits that a device sets to a piece of work."""

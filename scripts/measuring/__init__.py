"""Shared by the benchmarks: options, idle shares from traces, rows of tables, a core with a set pace."""

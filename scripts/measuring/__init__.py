"""What the benchmarks share beside `jaxllm/scaling/`: idle shares from traces, rows of tables, an engine core with a set pace."""

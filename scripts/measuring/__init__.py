"""What the benchmarks share beside `jaxllm/scaling/`: options, idle shares from traces, rows of tables, a core with a set pace."""

"""Parts of bench_tiers.py, by what they measure."""

"""Data-parallel ranks: groups of devices with requests, rows and a KV cache of their own, which share the experts of a mixture in every
step. Here are their schedulers as one, and what they exclude; in the runner they are an axis of its programs. Does not import JAX."""

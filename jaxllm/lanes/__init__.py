"""Lanes: groups of devices with requests, rows and a KV cache of their own, which share the experts of a mixture in every step."""

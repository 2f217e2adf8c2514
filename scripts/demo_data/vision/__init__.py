"""Data and training of the demo model that sees: drawn pictures and questions about them, packing, model, step and test.

Only `model`, `optimizer`, `training` and `answers` import JAX: the processes that draw start in a moment.
"""

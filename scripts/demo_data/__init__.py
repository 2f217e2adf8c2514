"""Data and training of the demo model: text and dialogues, tokenizer, packing, training step and test.

Only `training` and `direct` import JAX: the processes that generate data start in a moment. `vision` is for the model that sees.
"""

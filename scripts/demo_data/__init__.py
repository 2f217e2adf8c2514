"""How the demo model comes about: its text and dialogues, tokenizer, packing, training step and test.

Only `training` and `direct` import JAX: the processes that generate data start in a moment.
"""

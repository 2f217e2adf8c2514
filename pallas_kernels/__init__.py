"""GPU kernels for LLM inference, and plain JAX versions of the same functions. Imports JAX only; usable without jaxllm.

A folder per function: `__init__.py` holds the signature and picks an implementation, the other files are the implementations,
the plainest one (`reference.py`, or `xla.py` where a line of JAX is enough) being the truth for the rest.
Dimension letters, used as suffixes of array names: T tokens, R rows (requests), K key-value heads, G query heads per key-value
head, H head width, P pages in the pool, S tokens per page, B pages per row; where needed L keys of a chunk, M rows of a tile.
"""

"""What shows that a kernel computes the right thing: cases of each op, and running them. Imports JAX and NumPy only.

`case` is the shape of a check, a file per op has its cases, `check` compiles and runs them. Two kinds of oracles: plain JAX for
large shapes (`scripts/check_gpu.py`), and NumPy on the host, which compiles nothing, for those that an engine runs at its start.
"""

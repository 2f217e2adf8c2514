"""Instruments for measuring an engine in this process: timed runs, a profiler's trace, what the devices could do at best.

`jaxllm bench` and the scripts measure with them.
"""

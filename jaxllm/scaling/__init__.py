"""How a model's speed grows with the GPUs that its layers are split over: the experiment behind `jaxllm bench scaling`.

What runs in the command's own process never imports JAX; a process per tensor-parallel size measures.
"""

"""The options of the engine that belong to one feature, with their checks. `jaxllm.config` has them all. Does not import JAX."""

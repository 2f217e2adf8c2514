"""Two model families: `example` is made of parts that jaxllm has, `scaled` adds its own Flax class."""

"""Two model families: `example` is made of parts that jaxllm has, `scaled` brings a Flax class of its own."""

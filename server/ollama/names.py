"""The names of models in ollama's requests."""

from server.context import ServerContext


async def adapter_of(name: str | None, context: ServerContext) -> str | None:
    """See `ServerContext.adapter_of`. ollama's clients may append a tag to the name."""
    return await context.adapter_of(name.removesuffix(":latest") if name and name not in context.model_names else name)

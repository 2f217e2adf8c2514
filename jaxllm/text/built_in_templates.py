"""Chat templates of models whose checkpoints have none, and say in code how a conversation is written."""

from importlib import resources

OF_ARCHITECTURES = {"DeepseekV32ForCausalLM": "deepseek_v32", "MistralLarge3ForCausalLM": "mistral_large_3"}
"""Names of templates by architecture. --chat-template accepts them in place of a file."""


def built_in_template(name: str) -> str:
    """The template of this name."""
    return (resources.files("jaxllm") / "data" / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8")

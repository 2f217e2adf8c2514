"""GET /tokenizer_info: the tokenizer's configuration; available only with --enable-tokenizer-info-endpoint."""

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request

from server.context import context_of

router = APIRouter(tags=["Tokens"])


@router.get("/tokenizer_info")
async def tokenizer_info(request: Request) -> dict[str, Any]:
    """tokenizer_config.json and the chat template in use, without file names and paths of this machine."""
    context = context_of(request)
    tokenizer = context.tokenizer
    found = {key: value for key, value in tokenizer.config.items() if not key.endswith(("_file", "_path"))}
    found.setdefault("tokenizer_class", type(tokenizer).__name__)
    return {**found, "chat_template": context.engine.chat_template or tokenizer.chat_templates.get("default")}

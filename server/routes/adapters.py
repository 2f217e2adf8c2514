"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter; available only with --allow-runtime-lora-updating and the operator's key."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from jaxllm.errors import AdapterError
from server.body import read_body
from server.context import context_of
from server.errors import ApiError, bad_request
from server.openapi import json_body
from server.protocol.adapters import LoadLoraAdapterRequest, UnloadLoraAdapterRequest

router = APIRouter(tags=["Operator"])


@router.post("/v1/load_lora_adapter", openapi_extra=json_body(LoadLoraAdapterRequest))
async def load_lora_adapter(request: Request) -> Response:
    """Load an adapter, and answer when requests may name it."""
    body = await read_body(request, LoadLoraAdapterRequest)
    try:
        await context_of(request).adapters.load(body.lora_name, body.lora_path, replace=body.load_inplace)
    except AdapterError as error:  # in full: the operator gave the path
        raise bad_request(str(error), "lora_path", "adapter_not_usable") from None
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


@router.post("/v1/unload_lora_adapter", openapi_extra=json_body(UnloadLoraAdapterRequest))
async def unload_lora_adapter(request: Request) -> Response:
    """Refuse new requests for an adapter, and free its memory when those that run have ended."""
    body = await read_body(request, UnloadLoraAdapterRequest)
    if not await context_of(request).adapters.unload(body.lora_name):
        raise ApiError(404, f"The lora adapter {body.lora_name[:200]!r} cannot be found.", param="lora_name", code="not_found")
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

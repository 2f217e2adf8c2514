"""Plans the encoding of audio: before the first step of each request, a few requests in a step."""

from collections.abc import Collection

from jaxllm.device_ops import AnyDeviceOp, EncodeAudio
from jaxllm.encoder_sizes import MAX_STEP_CLIPS
from jaxllm.errors import InvalidRequestError
from jaxllm.request import PromptItem, Request
from jaxllm.scheduler.admission import ChunkRoom


class AudioEncoding(ChunkRoom):
    """Audio at the beginning of prompts. What is encoded of a request lies with its row until it ends or is preempted."""

    item_kinds = ("audio",)

    def __init__(self, payload_bytes: int):
        """payload_bytes: those of every clip."""
        self._payload_bytes = payload_bytes
        self._granted: set[Request] = set()
        """Requests whose audio this step encodes."""
        self._encoded: set[Request] = set()
        """Requests whose audio complete plans have encoded."""

    def check(self, item: PromptItem) -> None:
        if item.position or len(item.payload) != self._payload_bytes:
            raise InvalidRequestError(
                f"the audio at position {item.position} has {len(item.payload)} bytes of features; it must be at position 0 with "
                f"{self._payload_bytes}",
                "prompt",
            )

    def release(self, request: Request) -> None:
        self._granted.discard(request)
        self._encoded.discard(request)

    def begin_step(self, *, decodes: bool) -> None:
        self._granted.clear()

    def limit(self, request: Request, start: int, count: int) -> int:
        if request in self._encoded or not request.spec.items:
            return count
        if len(self._granted) == MAX_STEP_CLIPS:
            return 0
        self._granted.add(request)
        return count

    def ops(self, request: Request, start: int, count: int) -> list[AnyDeviceOp]:
        if request not in self._granted:
            return []
        self._granted.remove(request)
        self._encoded.add(request)
        return [EncodeAudio(0, request.request_id, item.payload) for item in request.spec.items]

    def forget(self) -> None:
        assert not self._encoded, "a request computes"
        self._granted.clear()

    def check_integrity(self, requests: Collection[Request]) -> None:
        assert self._granted | self._encoded <= {*requests}, "a request that ended has audio"
        assert not self._granted & self._encoded, "audio of a request is encoded twice"
        for request in requests:
            if request.spec.items and request.num_computed_tokens:
                assert request in self._encoded, "a request computes whose audio is not encoded"

"""The body of /v1/audio/transcriptions and /v1/audio/translations, apart from its file."""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from server.protocol.common import Int64, Items, RequestId, RequestModel

Format = Literal["json", "text", "srt", "verbose_json", "vtt"]
SAMPLING = (
    *("top_p", "top_k", "min_p", "seed", "frequency_penalty", "presence_penalty", "repetition_penalty"),
    "temperature",
)
"""Fields that SamplingParams has too."""


class TranscriptionRequest(RequestModel):
    """Fields of a request for the transcript of a file."""

    REFUSED: ClassVar[Mapping[str, str]] = {
        "include": "nothing: logprobs of transcripts are not reported",
        "chunking_strategy": "nothing: files are cut at quiet places",
        "known_speaker_names": "nothing: speakers are not told apart",
        "known_speaker_references": "nothing: speakers are not told apart",
        "use_beam_search": "temperature",
    }

    model: str | None = None
    language: str | None = None
    """Language of the audio; None: the model says it of the first clip."""
    prompt: Annotated[str, Field(max_length=1 << 16)] = ""
    """Text before the transcript, whose spelling and style it follows."""
    response_format: Format = "json"
    timestamp_granularities: Annotated[Items[Literal["segment", "word"]], Field(max_length=2)] = []
    stream: bool = False
    stream_include_usage: bool = False
    temperature: float = 0.0
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: Int64 | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    """Most tokens of each clip."""
    timeout: float | None = None
    request_id: RequestId | None = None

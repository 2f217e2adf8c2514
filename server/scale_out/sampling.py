"""SamplingParams as JSON: what render writes and generate reads."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxllm.sampling_params import FIELDS, RequestOutputKind, SamplingParams
from server.errors import bad_request
from server.options import LimitOptions
from server.protocol.common import SamplingFields
from server.protocol.nested import parse
from server.sampling import check_limits, logit_bias_of

_OF_PYTHON = frozenset({"output_kind", "flat_logprobs", "bad_words_token_ids", "guided_decoding"})
"""Fields for callers in Python, which JSON does not carry."""
_IGNORED = _OF_PYTHON | {"skip_clone", "output_text_buffer_length"}
_NAMES = FIELDS.keys() - _OF_PYTHON


def as_json(params: SamplingParams) -> dict[str, Any]:
    """The fields that are set."""
    found = {name: getattr(params, name) for name in sorted(_NAMES)}
    if (form := params.structured_outputs) is not None:
        found["structured_outputs"] = {
            name: value for name, value in dataclasses.asdict(form).items() if value not in (None, False)
        }
    return {name: value for name, value in found.items() if value is not None}


def params_of(
    given: Mapping[str, Any], limits: LimitOptions, *, stream: bool, max_tokens: int | None, with_text: bool
) -> SamplingParams:
    """Read `sampling_params`. `max_tokens`: where they have none. Raises ApiError or InvalidRequestError."""
    values = {name: value for name, value in given.items() if value is not None and not name.startswith("_")}
    for name in values.keys() - _NAMES - _IGNORED:
        if values[name]:
            raise bad_request(f"sampling_params.{name[:80]} is not supported; leave it out", "sampling_params")
    values = {name: value for name, value in values.items() if name in _NAMES}
    checked = parse(
        SamplingFields,
        {name: values[name] for name in ("n", "stop", "stop_token_ids", "logit_bias") if name in values},
        "sampling_params",
    )
    check_limits(checked, limits)
    if checked.logit_bias:
        values["logit_bias"] = logit_bias_of(checked.logit_bias)
    if isinstance(extra := values.get("extra_args"), Mapping):
        values["extra_args"] = {name: value if isinstance(value, list) else [value] for name, value in extra.items()}
    if stream and values.get("prompt_logprobs") is not None:
        raise bad_request("sampling_params.prompt_logprobs cannot be streamed; set stream to false", "sampling_params")
    values.setdefault("max_tokens", max_tokens)
    if not with_text and not values.get("stop"):
        values["detokenize"] = False
    return SamplingParams(**values, output_kind=RequestOutputKind.DELTA if stream else RequestOutputKind.FINAL_ONLY)

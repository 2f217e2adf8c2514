"""Checks whether a request ends with its last token. Stop strings are checked where the text is, outside the engine core."""

from collections.abc import Mapping

from jaxllm.request import Request, RequestStatus

REPETITION_REASON = "repetition_detected"


def check_stop(request: Request) -> RequestStatus | None:
    """The status with which the request ends after its last token, or None; sets `stop_reason` where there is one.

    `min_tokens` delays only the detection of repetition. Before it, the sampler does not draw stop tokens; if one is drawn
    nevertheless, it ends the request.
    """
    last = request.token_ids[-1]
    if last == request.eos_token_id:
        return RequestStatus.FINISHED_STOPPED
    if last in request.stop_token_ids:
        request.stop_reason = last
        return RequestStatus.FINISHED_STOPPED
    if len(request.token_ids) >= request.max_num_tokens:
        return RequestStatus.FINISHED_LENGTH_CAPPED
    params = request.sampling_params
    if (
        params.repetition_detection
        and request.num_output_tokens >= params.min_tokens
        and ends_in_repetition(request.token_ids, request.num_prompt_tokens, params.repetition_detection)
    ):
        request.stop_reason = REPETITION_REASON
        return RequestStatus.FINISHED_REPETITION
    return None


def ends_in_repetition(token_ids: list[int], start: int, detection: Mapping[str, int]) -> bool:
    """Whether token_ids[start:] ends in `min_count` copies of a pattern of min_pattern_size … max_pattern_size tokens."""
    count = detection["min_count"]
    longest = min(detection["max_pattern_size"], (len(token_ids) - start) // count)
    for size in range(max(1, detection.get("min_pattern_size", 1)), longest + 1):
        # `count` copies end here exactly if the last (count - 1) · size tokens each equal the one `size` before.
        if all(token_ids[-i] == token_ids[-i - size] for i in range(1, (count - 1) * size + 1)):
            return True
    return False

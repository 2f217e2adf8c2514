"""Failures inside the scheduler, after which it must start over."""

from jaxllm.outputs import EngineCoreOutput


class PlanError(Exception):
    """Planning failed at a request, perhaps half done. The original error is the cause."""

    def __init__(self, request_id: str):
        super().__init__(f"planning failed at request {request_id!r}")
        self.request_id = request_id


class UpdateError(Exception):
    """Processing the results of a step failed. The original error is the cause."""

    def __init__(self, outputs: list[EngineCoreOutput]):
        super().__init__("taking in a step failed")
        self.outputs = outputs
        """Outputs of the requests processed before the failure. Their tokens are committed, so they must be reported."""


class LostError(Exception):
    """State on the device that steps use was lost, but not the requests. The original error is the cause."""

    def __init__(self, request_ids: list[str]):
        super().__init__("what steps need on the device was lost")
        self.request_ids = request_ids
        """Requests that end with it."""

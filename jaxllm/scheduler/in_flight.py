"""The steps that are planned and whose results have not come."""

from collections.abc import Collection, Iterable

from jaxllm.request import Request
from jaxllm.scheduler.results import Share
from jaxllm.scheduler_output import SchedulerOutput


class InFlight:
    """The shares of requests in steps in flight, by number of the step. Steps are done in the order in which they were planned."""

    def __init__(self) -> None:
        self._steps: dict[int, list[Share]] = {}
        self._num_prompt_tokens: dict[int, int] = {}
        """Tokens of each step, without one for each row and without drafts."""
        self.latest_id = self.done_id = 0
        """Numbers of the latest step that was planned, and of the latest one whose results came."""

    def add(self, shares: list[Share], num_prompt_tokens: int) -> None:
        """The latest step has rows and will run."""
        self._steps[self.latest_id] = shares
        self._num_prompt_tokens[self.latest_id] = num_prompt_tokens

    def done(self, step_id: int) -> list[Share]:
        """The results of a step have come. Returns its shares."""
        self.done_id = step_id
        self._num_prompt_tokens.pop(step_id, None)
        return self._steps.pop(step_id, [])

    def shares_of(self, step_id: int) -> list[Share]:
        """The shares in a step; none if it is not in flight."""
        return self._steps.get(step_id, [])

    def steps(self) -> Collection[list[Share]]:
        """The shares of each step, in order."""
        return self._steps.values()

    def drop(self, requests: Collection[Request], also: Iterable[list[Share]] = ()) -> None:
        """Ignore the results of requests. also: shares of steps that are not in flight."""
        for step in (*also, *self._steps.values()) if requests else ():
            step[:] = [share for share in step if share[0] not in requests]

    def clear(self) -> None:
        """Ignore the results of all steps in flight."""
        self._steps.clear()
        self._num_prompt_tokens.clear()

    @property
    def num_prompt_tokens(self) -> int:
        return sum(self._num_prompt_tokens.values())

    def tokens_are_known(self, plan: SchedulerOutput) -> bool:
        """See Scheduler."""
        masked_ids = set(plan.masked_request_ids)
        shares = (share for share in self.shares_of(plan.step_id) if share[2].request_id in masked_ids)
        return all(
            request.status.is_finished or request.num_output_placeholders <= num_samples for request, num_samples, _ in shares
        )

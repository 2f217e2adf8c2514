"""The requests of a fleet's clients: chats of several turns, prompts with a common beginning, or prompts that share nothing."""

import math
import random
from array import array
from dataclasses import dataclass, field

from scripts.fleet.engine import BLOCK_SIZE, Job

KINDS = ("chats", "shared", "none")


@dataclass(frozen=True)
class Work:
    """Workload of clients. Lengths in tokens are means of geometric distributions, times of exponential ones."""

    kind: str
    requests_per_second: float
    num_requests: int
    num_systems: int = 20
    """Different system prompts, used by Zipf's law."""
    system_tokens: int = 512
    user_tokens: int = 200
    output_tokens: int = 200
    num_turns: int = 5
    think_seconds: float = 15.0
    burst: float = 1.0
    """Two seconds in every ten have so many times as many arrivals as the other eight."""
    most_tokens: int = 8192
    """A chat that is longer than this ends."""


@dataclass(slots=True, eq=False)
class Chat:
    """A conversation: everything said so far."""

    system: int
    keys: array  # type: ignore[type-arg]
    num_tokens: int
    turns_left: int
    num_computed_blocks: int = 0
    """Blocks that were computed somewhere for its previous turns."""


@dataclass
class Clients:
    """Makes chats and their turns."""

    work: Work
    rng: random.Random
    num_made: int = 0
    """Requests so far."""
    computed_systems: set[int] = field(default_factory=set)
    """System prompts that were computed somewhere."""

    def __post_init__(self) -> None:
        work = self.work
        self._systems = [self._new_keys(work.system_tokens // BLOCK_SIZE) for _ in range(work.num_systems)]
        self._weights = [1 / (1 + index) for index in range(work.num_systems)]
        self._has_system = work.kind != "none"
        self._num_turns = work.num_turns if work.kind == "chats" else 1

    def _new_keys(self, count: int) -> array:  # type: ignore[type-arg]
        return array("Q", [self.rng.getrandbits(64) for _ in range(count)])

    def _length(self, mean: float) -> int:
        return 1 + int(math.log(1 - self.rng.random()) / math.log(1 - 1 / mean))

    def next_arrival(self, now: float) -> float:
        """When the next chat begins."""
        work = self.work
        rate = work.requests_per_second / self._num_turns
        quiet = rate / (0.2 * work.burst + 0.8)
        while True:
            now += self.rng.expovariate(quiet * work.burst)
            if now % 10 < 2 or self.rng.random() < 1 / work.burst:
                return now

    def new_chat(self) -> Chat:
        """A chat that begins."""
        turns = self._length(self._num_turns) if self._num_turns > 1 else 1
        if not self._has_system:
            return Chat(-1, array("Q"), self.work.system_tokens, turns)
        (system,) = self.rng.choices(range(len(self._systems)), self._weights)
        return Chat(system, self._systems[system][:], self.work.system_tokens, turns)

    def turn(self, chat: Chat, now: float, api_server: int) -> tuple[Job, int]:
        """The next request of a chat, and its tokens that are computed already if every token computed anywhere is kept."""
        num_prompt = chat.num_tokens + self._length(self.work.user_tokens)
        num_output = self._length(self.work.output_tokens)
        num_blocks = (num_prompt + num_output - 1) // BLOCK_SIZE  # the last token is not computed
        chat.keys.extend(self._new_keys(num_blocks - len(chat.keys)))
        known = chat.num_computed_blocks
        if chat.system in self.computed_systems:
            known = max(known, self.work.system_tokens // BLOCK_SIZE)
        job = Job(self.num_made, chat.keys[:num_blocks], num_prompt, num_output, now, api_server)
        self.num_made += 1
        chat.num_tokens = num_prompt + num_output
        return job, min(min(known, num_prompt // BLOCK_SIZE) * BLOCK_SIZE, num_prompt - 1)

    def first_token(self, chat: Chat) -> None:
        """The prompt of its turn is computed."""
        if self._has_system:
            self.computed_systems.add(chat.system)

    def ended(self, chat: Chat, job: Job) -> float | None:
        """A turn has ended. Returns the seconds until the next; None if it was the last."""
        chat.num_computed_blocks = len(job.keys)
        chat.turns_left -= 1
        if not chat.turns_left or chat.num_tokens > self.work.most_tokens:
            return None
        return self.rng.expovariate(1 / self.work.think_seconds)

"""Chooses on which devices a mixture's experts and their copies are, by the tokens that each got.

First the experts with the most tokens for each copy get another one, one after the other, until all slots are taken; then the copies,
those with the most tokens first, go to the device that has the fewest. The idea is that of DeepSeek's expert-parallel load balancer
(arXiv:2412.19437, section 3.4). In addition, experts stay where they are as far as that is nearly as even.
"""

import heapq
from collections.abc import Collection, Sequence

import numpy as np

NEARLY = 1.02
"""A placement whose busiest device has at most so many times the tokens is taken if fewer experts move."""


def device_loads(slots_P: np.ndarray, tokens_E: np.ndarray, num_devices: int) -> np.ndarray:
    """Tokens of each device, float64 [N], if copies share their expert's tokens evenly. slots_P: the expert in each slot."""
    num_copies_E = np.bincount(slots_P, minlength=len(tokens_E))
    share_P = (tokens_E / np.maximum(num_copies_E, 1))[slots_P]
    return share_P.reshape(num_devices, -1).sum(1)


def place(slots_P: np.ndarray, tokens_E: np.ndarray, num_devices: int) -> np.ndarray:
    """The expert for each slot. slots_P: the one that is there now; this is returned if nothing is much better."""
    before = device_loads(slots_P, tokens_E, num_devices).max()
    num_slots = len(slots_P) // num_devices
    now = [set(slots.tolist()) for slots in slots_P.reshape(num_devices, -1)]
    shares = _shares(tokens_E, len(slots_P), num_devices)
    found = [_placed(_nearest(_packed(shares, num_slots, [()] * num_devices), now), slots_P)]
    found.append(_placed(_packed(shares, num_slots, now), slots_P))
    busiest = [device_loads(slots, tokens_E, num_devices).max() for slots in found]
    moves = [int((slots != slots_P).sum()) for slots in found]
    allowed = [i for i in range(len(found)) if busiest[i] <= NEARLY * min(busiest)]
    best = min(allowed, key=lambda i: (moves[i], busiest[i]))
    return found[best] if busiest[best] * NEARLY < before else slots_P


def plan_moves(before_P: np.ndarray, after_P: np.ndarray, num_devices: int) -> np.ndarray:
    """How devices come from one placement to another: moves int32 [2, R, N], as `Executor.move_experts` takes them. A device takes an
    expert that it has from itself."""
    num_slots = len(before_P) // num_devices
    moves_2RN = np.zeros((2, num_slots, num_devices), np.int32)
    moves_2RN[1] = num_slots
    holders: dict[int, list[int]] = {}
    for slot, expert in enumerate(before_P.tolist()):
        holders.setdefault(expert, []).append(slot)
    num_rounds = 0
    for device in range(num_devices):
        own = slice(device * num_slots, (device + 1) * num_slots)
        changed = np.flatnonzero(before_P[own] != after_P[own]).tolist()
        for number, slot in enumerate(changed):
            sources = holders[int(after_P[device * num_slots + slot])]
            source = next((s for s in sources if s // num_slots == device), sources[device % len(sources)])
            moves_2RN[:, number, device] = source, slot
        num_rounds = max(num_rounds, len(changed))
    return np.ascontiguousarray(moves_2RN[:, :num_rounds])


def table_of(slots_P: np.ndarray, num_experts: int, num_copies: int) -> np.ndarray:
    """Int32 [E, 1 + num_copies]: how many copies each expert has, and their slots."""
    table_EC = np.zeros((num_experts, 1 + num_copies), np.int32)
    for slot, expert in enumerate(slots_P.tolist()):
        table_EC[expert, 0] += 1
        table_EC[expert, table_EC[expert, 0]] = slot
    return table_EC


def _shares(tokens_E: np.ndarray, num_slots: int, num_devices: int) -> list[tuple[float, int]]:
    """(tokens, expert) of every copy, most tokens first. No expert has more copies than there are devices."""
    num_copies_E = np.ones(len(tokens_E), np.int64)
    heap = [(-float(tokens), expert) for expert, tokens in enumerate(tokens_E)]
    heapq.heapify(heap)
    for _ in range(num_slots - len(tokens_E)):
        _, expert = heapq.heappop(heap)
        num_copies_E[expert] += 1
        if num_copies_E[expert] < num_devices:
            heapq.heappush(heap, (-tokens_E[expert] / num_copies_E[expert], expert))
    copies = [(tokens_E[e] / num_copies_E[e], e) for e in range(len(tokens_E)) for _ in range(num_copies_E[e])]
    return sorted(copies, key=lambda copy: (-copy[0], copy[1]))


def _packed(shares: Sequence[tuple[float, int]], num_slots: int, now: Sequence[Collection[int]]) -> list[list[int]]:
    """The experts of each device. A copy stays on a device that has the expert now if that gets hardly more than its even part."""
    num_devices = len(now)
    loads, devices = [0.0] * num_devices, [[] for _ in now]  # type: tuple[list[float], list[list[int]]]
    even = sum(tokens for tokens, _ in shares) / num_devices
    for tokens, expert in shares:
        free = [d for d in range(num_devices) if len(devices[d]) < num_slots]
        free = [d for d in free if expert not in devices[d]] or free
        stays = [d for d in free if expert in now[d] and loads[d] + tokens <= even * NEARLY]
        best = min(stays or free, key=loads.__getitem__)
        devices[best].append(expert)
        loads[best] += tokens
    return devices


def _nearest(devices: Sequence[Sequence[int]], now: Sequence[Collection[int]]) -> list[list[int]]:
    """Assign each group of experts to the device that has the most of them now, those with the most first."""
    found: list[list[int]] = [[] for _ in now]
    common = sorted(
        (-sum(expert in have for expert in group), number, device)
        for number, group in enumerate(devices)
        for device, have in enumerate(now)
    )
    groups, free = set(range(len(devices))), set(range(len(now)))
    for _, number, device in common:
        if number in groups and device in free:
            found[device] = list(devices[number])
            groups.remove(number)
            free.remove(device)
    return found


def _placed(devices: Sequence[Sequence[int]], slots_P: np.ndarray) -> np.ndarray:
    """The expert for each slot: experts that stay on their device stay in their slot."""
    placed = []
    for wanted, now in zip(devices, slots_P.reshape(len(devices), -1).tolist(), strict=True):
        left = list(wanted)
        slots: list[int | None] = [None] * len(now)
        for i, expert in enumerate(now):
            if expert in left:
                left.remove(expert)
                slots[i] = expert
        placed += [left.pop(0) if expert is None else expert for expert in slots]
    return np.array(placed)

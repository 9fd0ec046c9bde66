"""Which prompt is computed next. Policies are pure functions of frozen data; a plugin's is called the same way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from drivetrain.errors import ConfigError

AGED_STEPS = 16
AGED_EVERY = 16
AGED_SHARE = 4


class Candidate(NamedTuple):
    """A request with prompt tokens to compute. ``remaining``: those not known to be cached; ``order``: arrival number;
    ``skipped``: steps in a row that passed it over; ``priority``: lower goes first."""

    remaining: int
    order: int
    priority: int
    skipped: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """One candidate's turn: at most ``cap`` tokens of it (0: no cap) in this step."""

    index: int
    cap: int = 0


Policy = Callable[[Sequence[Candidate], int, int], Sequence[Share]]


def fcfs(candidates: Sequence[Candidate], budget: int, step: int) -> Sequence[Share]:
    """First come, first served."""
    return [Share(index=i) for i in sorted(range(len(candidates)), key=lambda i: candidates[i].order)]


def priority(candidates: Sequence[Candidate], budget: int, step: int) -> Sequence[Share]:
    """The lowest priority number first, then the order of arrival."""
    ranked = sorted(range(len(candidates)), key=lambda i: (candidates[i].priority, candidates[i].order))
    return [Share(index=i) for i in ranked]


def shortest_uncached_first(candidates: Sequence[Candidate], budget: int, step: int) -> Sequence[Share]:
    """The fewest tokens to compute first; long prompts may wait for ever under a steady load of short ones."""
    ranked = sorted(range(len(candidates)), key=lambda i: (candidates[i].remaining, candidates[i].order))
    return [Share(index=i) for i in ranked]


def fair(candidates: Sequence[Candidate], budget: int, step: int) -> Sequence[Share]:
    """Shortest first, but every sixteenth step a quarter of the budget goes to the oldest prompt that was passed over
    for sixteen steps. So none waits for ever, and a burst of short prompts is late by at most one step in 64."""
    shares = list(shortest_uncached_first(candidates, budget, step))
    if step % AGED_EVERY == 0:
        aged = [i for i, one in enumerate(candidates) if one.skipped >= AGED_STEPS]
        if aged:
            oldest = min(aged, key=lambda i: candidates[i].order)
            shares.insert(0, Share(index=oldest, cap=max(1, budget // AGED_SHARE)))
    return shares


POLICIES: dict[str, Policy] = {
    "fair": fair,
    "fcfs": fcfs,
    "priority": priority,
    "shortest-uncached-first": shortest_uncached_first,
}


def policy_of(name: str) -> Policy:
    """Return a policy by name. ConfigError naming those that exist."""
    if name not in POLICIES:
        raise ConfigError(f"--scheduling-policy {name}: no such policy", fix=f"one of {', '.join(POLICIES)}")
    return POLICIES[name]

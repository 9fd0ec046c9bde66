"""Ten thousand random operations, with every invariant checked after each of them."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from tests.unit.sched.fleet import Fleet
from tests.unit.sched.simulated import FULL, STATE, WINDOW, SlowConnector

CASES: dict[str, dict] = {
    "shared": {},
    "deep": {"depth": 3},
    "partitioned": {"shared": False, "depth": 2},
    "drafts": {"depth": 2, "drafts": 3},
    "large_blocks": {"groups": ({**FULL, "block_tokens": 16}, {**WINDOW, "block_tokens": 16}), "depth": 2},
    "recurrent": {"groups": (FULL, STATE), "depth": 2},
    "recurrent_window": {"groups": (WINDOW, STATE, {**STATE, "layer_bytes": 512}), "depth": 3},
    "no_prefix": {"prefix_caching": False, "depth": 2},
    "tight": {"budget": 200 * 1024, "depth": 2},
    "tight_drafts": {"budget": 200 * 1024, "max_num_seqs": 5, "depth": 3, "drafts": 2},
    "tight_recurrent": {"groups": (FULL, STATE), "budget": 80 * 1024, "depth": 2},
    "fixed_chunks": {"fixed_chunk": 16, "depth": 2},
    "unannounced": {"announce_freed": False, "depth": 2},
    "full_hits": {"groups": ({**FULL, "block_tokens": 8},), "announce_freed": False, "depth": 3},
    "few_tokens": {"max_num_batched_tokens": 6, "depth": 3},
    "connector": {"connector": True, "depth": 2},
    "tight_connector": {"connector": True, "budget": 200 * 1024, "depth": 3},
}


def fleet_of(name: str, seed: int) -> Fleet:
    settings = dict(CASES[name])
    if settings.pop("connector", False):
        settings["connector"] = SlowConnector(seed)
    return Fleet(seed, **settings)


@pytest.mark.parametrize("name", CASES)
def test_random_operations(name: str) -> None:
    fleet = fleet_of(name, seed=1)
    for kind in np.random.default_rng(7).random(400):
        fleet.operate(kind)
    fleet.drain()
    assert fleet.next > 40, "too few requests to mean anything"
    assert fleet.given or name.startswith("tight"), "no block was given back"


class Operations(RuleBasedStateMachine):
    """The same operations, chosen and shrunk by hypothesis."""

    @initialize(name=st.sampled_from(sorted(CASES)), seed=st.integers(0, 2**16))
    def begin(self, name: str, seed: int) -> None:
        self.fleet = fleet_of(name, seed)

    @rule(kind=st.floats(0, 1, exclude_max=True))
    def operate(self, kind: float) -> None:
        self.fleet.operate(kind)

    @rule(steps=st.integers(1, 4))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.fleet.operate(0.9)

    def teardown(self) -> None:
        if hasattr(self, "fleet"):
            self.fleet.drain()


def test_ten_thousand_operations_by_hypothesis() -> None:
    checks = settings(
        max_examples=100,
        stateful_step_count=100,
        deadline=None,
        derandomize=True,
        report_multiple_bugs=False,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(Operations, settings=checks)

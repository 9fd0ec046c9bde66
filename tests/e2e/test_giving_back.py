"""Captures that need more than was planned get memory of the cache: tokens are as ever, nobody touches what went."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from drivetrain.errors import RequestError
from drivetrain.runner.dummies import capture_missing
from drivetrain.runner.reserve import MARGIN
from drivetrain_mirage.ledger import MirageOutOfMemory
from tests.checkpoints import random_ids, tiny_checkpoint
from tests.e2e.harness import Served
from tests.unit.runner.test_graphs import many_graphs

__all__ = ["many_graphs"]
BLOCK_BYTES = 98_304  # one block of each of the two groups, a window and full attention
BLOCKS = 240
PROMPTS = [random_ids(n, i) for i, n in enumerate((118, 140, 129, 60, 150, 124, 31))]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("gemma3_text", tmp_path_factory.mktemp("giving") / "gemma")


@pytest.fixture
def served(checkpoint: Path, many_graphs: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    """An engine whose later captures lack memory: of what was planned there is less than one takes."""
    monkeypatch.setattr("drivetrain.runner.giving.SHARE", 0.5)
    yield from opened(checkpoint)


def opened(checkpoint: Path, blocks: int = BLOCKS) -> Iterator[Served]:
    made = Served(
        checkpoint,
        "mirage",
        cache_bytes=blocks * BLOCK_BYTES,
        depth=2,
        max_num_seqs=20,
        backend_options={"native": "true", "memory": str(1 << 30)},
    )
    reserve = made.opened.runner.reserve
    reserve.plan(graphs=reserve.taken, step=0)
    ledger = made.opened.runner.runtime.owner.ledger
    ledger.total = ledger.allocated + MARGIN
    yield made
    made.close()


def pool_of(served: Served):
    return served.loop.scheduler.cache.pool


def limits_of(served: Served) -> list[int]:
    return [group.limit for group in pool_of(served).groups]


def capture_all(served: Served, most: int = 2000) -> None:
    for _ in range(most):
        if not capture_missing(served.opened.runner):
            return
        served.opened.runner.runtime.synchronize()
    pytest.fail("captures do not come to an end")


def test_blocks_are_given_back_and_tokens_stay_right(checkpoint: Path, served: Served, caplog) -> None:
    caplog.set_level(logging.INFO)
    plain = Served(checkpoint, "cpu", cache_bytes=4 << 20)
    wanted = plain.greedy(PROMPTS, 20)
    plain.close()
    before, total = limits_of(served), served.loop.stats().cache_total
    assert served.greedy(PROMPTS, 20) == wanted, "some steps were captured on the way"
    capture_all(served)
    figures, stats = served.loop.figures(), served.loop.stats()
    assert figures["graphs_captured"] == figures["graphs_wanted"] > 9 and figures["graphs_given_up"] == 0
    assert figures["graphs_measured_bytes"] > figures["graphs_planned_bytes"]
    after = limits_of(served)
    lost = sum(before) - sum(after)
    assert all(left < had for left, had in zip(after, before, strict=True))
    assert stats.cache_total == total - lost
    told = [line for line in caplog.messages if "given back for captured steps" in line]
    assert sum(int(line.split()[1]) for line in told) == lost and told[0].startswith("memory: ")
    caches = [handle for handle in served.opened.runner.caches if handle is not None]
    assert figures["memory_given_back_bytes"] == served.opened.memory.cache.total_bytes - sum(c.nbytes for c in caches)
    assert served.greedy(PROMPTS, 20) == wanted, "from what is cached, and in captured steps"
    served.loop.scheduler.reset_prefix_cache()
    assert served.greedy(PROMPTS, 20) == wanted


def test_no_table_leads_to_what_went_not_even_where_nobody_looks(served: Served) -> None:
    runner = served.opened.runner
    served.greedy(PROMPTS[:2], 4)
    table = runner.tables.tables[0]
    table[:, -1] = BLOCKS // 2 + 100
    capture_all(served)
    limit = limits_of(served)[0]
    assert limit < BLOCKS // 2 + 100
    with runner.runtime.activate():
        found = runner.runtime.to_host([table]).get()[0]
    assert found.max() < limit and found[:, -1].max() == 0 and found[:, 0].any()


def test_captures_wait_for_blocks_that_are_in_use(served: Served, caplog) -> None:
    caplog.set_level(logging.INFO)
    pool, runner = pool_of(served), served.opened.runner
    blocks = pool.take_many(0, 2 * BLOCKS)
    pool.drop_many(0, blocks[:-1])
    before = runner.graphs.count
    for _ in range(20):
        assert capture_missing(runner)
        runner.runtime.synchronize()
    assert runner.graphs.count == before and "are in use" in caplog.text and "given back" not in caplog.text
    assert served.loop.figures()["memory_given_back_bytes"] == 0
    served.submit(PROMPTS[0], 8)
    for _ in range(4):
        served.step()
    assert runner.graphs.count == before
    pool.drop(0, blocks[-1])
    served.run()
    capture_all(served)
    assert runner.graphs.count == runner.graphs.wanted


def test_running_requests_keep_the_last_blocks_until_they_end(
    checkpoint: Path, many_graphs: None, monkeypatch, caplog
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr("drivetrain.runner.giving.SHARE", 0.6)
    prompts = [random_ids(100 + 9 * i, 40 + i) for i in range(14)]
    plain = Served(checkpoint, "cpu", cache_bytes=8 << 20)
    wanted = plain.greedy(prompts, 60)
    plain.close()
    for served in opened(checkpoint, blocks=14):
        giving, waited = served.opened.runner.reserve.giving, []

        def between(step: int, served=served, giving=giving, waited=waited) -> None:
            if not waited and not any(group.refs[-1] for group in pool_of(served).groups):
                return
            assert waited or giving.ask(3 * BLOCK_BYTES)
            waited.append(not giving.settled())
            served.loop.check_integrity()

        served.loop._put_off = False  # nobody else asks
        numbers = [served.submit(prompt, 60) for prompt in prompts]
        served.run(between)
        assert sum(waited) > 5 and "are in use" in caplog.text and giving.given >= 3 * BLOCK_BYTES
        assert [served.open[number].tokens for number in numbers] == wanted
        assert served.greedy(prompts, 60) == wanted, "in fewer blocks, with hits"


def test_nothing_goes_while_the_device_still_works(served: Served) -> None:
    runner, gate = served.opened.runner, threading.Event()
    giving, caches = runner.reserve.giving, [handle for handle in runner.caches if handle is not None]
    before = sum(cache.nbytes for cache in caches)
    runner.runtime.owner.launch(gate.wait, (20.0,), None)
    assert giving.ask(BLOCK_BYTES)
    for _ in range(3):
        assert not giving.settled() and sum(cache.nbytes for cache in caches) == before
    gate.set()
    runner.runtime.synchronize()
    assert giving.settled() and sum(cache.nbytes for cache in caches) == before - giving.given
    assert giving.given >= BLOCK_BYTES


def test_a_small_part_of_the_cache_goes_at_most(checkpoint: Path, many_graphs: None, caplog) -> None:
    for served in opened(checkpoint):
        before, total = limits_of(served), served.loop.stats().cache_total
        ledger = served.opened.runner.runtime.owner.ledger
        ledger.total -= served.opened.memory.cache.total_bytes // 40
        capture_all(served)
        assert limits_of(served) == before and served.loop.stats().cache_total == total
        assert caplog.text.count("no more graphs are captured") == 1 and "given back" not in caplog.text
        assert served.loop.figures()["graphs_given_up"] > 0
        assert len(served.greedy(PROMPTS, 8)) == len(PROMPTS), "steps run eagerly"


def test_the_longest_request_still_fits_and_a_longer_one_is_refused_as_ever(served: Served) -> None:
    giving, runtime = served.opened.runner.reserve.giving, served.opened.runner.runtime
    giving._least = 0  # no share of it is too much
    with pytest.raises(RequestError) as before:
        served.loop.submit(_request(served, 257))
    while giving.ask(BLOCK_BYTES):
        while not giving.settled():
            runtime.synchronize()
    assert not giving.possible and sum(limits_of(served)) < 12, "little is left"
    assert served.loop.figures()["memory_given_back_bytes"] > (BLOCKS - 12) * BLOCK_BYTES
    with pytest.raises(RequestError) as after:
        served.loop.submit(_request(served, 257))
    assert str(before.value) == str(after.value) and "leaves no room" in str(after.value)
    long = [random_ids(249, 3), random_ids(240, 4)]
    assert [len(tokens) for tokens in served.greedy(long, 6)] == [6, 6]


def _request(served: Served, num: int):
    from drivetrain.params import GenerateRequest, SamplingParams

    return GenerateRequest(
        request_id=900, prompt_ids=np.ones(num, np.int32), sampling=SamplingParams(), max_tokens=1, seed=0
    )


def test_a_capture_that_runs_out_of_memory_is_done_again_with_what_was_given_back(
    served: Served, caplog, monkeypatch
) -> None:
    runner = served.opened.runner
    monkeypatch.setattr("drivetrain.runner.reserve.MARGIN", 1 << 16)
    inner, fails = runner.decoder.forward, [1]

    def forward(*given):
        if fails:
            fails.pop()
            raise MirageOutOfMemory("injected")
        return inner(*given)

    runner.decoder.forward = forward
    count = runner.backend.graphs.count
    runner.runtime.owner.ledger.total += 1 << 22
    assert capture_missing(runner) and "ran out of it: injected" in caplog.text
    assert runner.backend.graphs.count == count and not runner.graphs.given_up
    capture_all(served)
    assert runner.graphs.count == runner.graphs.wanted
    assert served.loop.figures()["memory_given_back_bytes"] > 0


def _no_mask(*given):
    raise MirageOutOfMemory("no memory for a mask")


FAULTS = {
    "raises": ("shrink", _no_mask, "no memory for a mask"),
    "none": ("shrink", lambda nbytes: None, "shrink of .* returned None"),
    "negative": ("shrink", lambda nbytes: -1, "shrink of .* returned int -1"),
    "much": ("shrink", lambda nbytes: 1 << 60, "shrink of .* returned int 1152921504606846976"),
    "no piece": ("piece_bytes", 0, "piece_bytes of .* is int 0"),
    "text": ("piece_bytes", "x", "piece_bytes of .* is str 'x'"),
    "mask": ("", None, "no memory for a mask"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_what_goes_wrong_in_giving_back_never_ends_the_engine(checkpoint: Path, served: Served, name, caplog) -> None:
    plain = Served(checkpoint, "cpu", cache_bytes=4 << 20)
    wanted = plain.greedy(PROMPTS, 12)
    plain.close()
    attribute, value, said = FAULTS[name]
    runner = served.opened.runner
    if attribute:
        for handle in runner.caches:
            if handle is not None:
                setattr(handle, attribute, value)
    else:
        runner.reserve.giving._forget = _no_mask
    assert served.greedy(PROMPTS, 12) == wanted
    for _ in range(200):
        served.step()
        runner.runtime.synchronize()
    figures, told = served.loop.figures(), [line for line in caplog.messages if "could not be given back" in line]
    assert len(told) == 1 and re.match(rf"memory: drivetrain-mirage \S+: .*{said}", told[0])
    assert runner.graphs.given_up and figures["graphs_given_up"] > 0 and figures["memory_given_back_bytes"] == 0
    served.loop.check_integrity()
    assert served.greedy(PROMPTS, 12) == wanted, "and again, in fewer blocks or in as many"


def test_memory_that_can_not_shrink_is_left_alone(checkpoint: Path) -> None:
    served = Served(checkpoint, "cpu", cache_bytes=4 << 20)
    assert served.opened.runner.reserve.giving is None
    assert served.loop.figures()["memory_given_back_bytes"] == 0
    served.close()

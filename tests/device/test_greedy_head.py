"""Greedy rows drawn inside the head's product give the tokens of a product and a draw, in bfloat16: alone, and beside
rows that draw at random or report log-probabilities, in captured steps and without graphs.

Up to 64 rows both multiply by the same sums, so tokens are equal where all else is: one step is in flight, and every
bucket is captured before.
"""

from __future__ import annotations

import pytest

from drivetrain.params import SamplingParams
from tests.checkpoints import random_ids
from tests.device.models import checkpoint
from tests.e2e.harness import Served, choice_of

pytestmark = pytest.mark.device
NEW = 40
DRAWN, REPORTED = SamplingParams(temperature=0.9, top_k=40), SamplingParams(temperature=0.0, logprobs=3)
ROWS = (1, 3, 8, 13)


@pytest.fixture(scope="module", params=["llama-even", "qwen3-even"])
def model(request, tmp_path_factory):
    return checkpoint(request.param, tmp_path_factory.mktemp("device"))


def tokens_of(served: Served, rows: int) -> list[list[int]]:
    """Greedy rows; a row that draws and one that reports come after a while and end before the others."""
    numbers = [served.submit(random_ids(5 + 3 * i, 400 + i), NEW) for i in range(rows)]
    more = {5: DRAWN, 20: REPORTED}

    def between(step: int) -> None:
        if step in more:
            numbers.append(served.submit(random_ids(9, 500 + step), 7, more[step], seed=3))

    served.run(between)
    return [served.open[number].tokens for number in numbers]


def found_by(model, device, options: dict[str, str]) -> tuple[dict[int, list[list[int]]], list[int]]:
    """Tokens for each number of greedy rows, and of how many rows the head and the draw were called as one. Where
    graphs replay, only captures and eager steps call."""
    settings = {"dtype": "bfloat16", "depth": 1, "max_num_seqs": 16, "enable_prefix_caching": False}
    served, calls = Served(model, device, backend_options=options, **settings), []
    drawer = served.loop.executor.runner._sampler._drawer
    run = drawer._greedy
    assert (run is None) is (options.get("greedy_head") == "off")

    class Counting:
        takes = staticmethod(lambda rows: run.takes(rows))

        def __call__(self, hidden):
            calls.append(len(hidden))
            return run(hidden)

    drawer._greedy = run and Counting()
    while served.loop.idle():
        pass
    found = {rows: tokens_of(served, rows) for rows in ROWS}
    served.close()
    return found, calls


@pytest.mark.parametrize("captured", [True, False])
def test_tokens_are_those_of_a_product_and_a_draw(model, device, without_graphs, captured):
    if all(option.key != "greedy_head" for option in choice_of(device).info.options):
        pytest.skip("not one op here")
    options = {} if captured else without_graphs.get("backend_options", {})
    wanted, calls = found_by(model, device, options | {"greedy_head": "off"})
    assert not calls and all(len(each) == rows + 2 for rows, each in wanted.items())
    assert len({tuple(tokens) for each in wanted.values() for tokens in each}) > len(ROWS)
    found, calls = found_by(model, device, options)
    assert found == wanted
    assert captured or {rows for rows in ROWS if rows > 1} <= set(calls), "steps of greedy rows alone make no logits"

"""Greedy rows drawn without their logits, where a backend claims the head and the draw as one: used where nothing else
wants logits and nowhere else, with the tokens of the ops apart, eager and replayed."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from drivetrain.dist.executors import InlineExecutor
from drivetrain.models.build import build
from drivetrain.models.families import read_spec
from drivetrain.models.source import resolve
from drivetrain.ops import Ops
from drivetrain.ops.reference import REFERENCE
from drivetrain.ops.reference.dense import ReferenceLinear
from drivetrain.runner.adjusting import AdjustTables, slot_words
from drivetrain.runner.batch import step_limits
from drivetrain.runner.drafter import RandomDrafter
from drivetrain.runner.drawing import DRAW_ELEMENT, Drawer
from drivetrain.runner.dummies import capture_plan
from drivetrain.runner.graphs import Captured
from drivetrain.runner.memory import plan_memory
from drivetrain.runner.rows import LOGPROBS, NON_GREEDY, TableShape
from drivetrain.runner.runner import Runner
from drivetrain.runner.warmup import warm_up
from drivetrain.sched.plan import AdjustStart
from drivetrain_api.v1 import DrawSpec, Fused, LinearSpec, Provided, SamplingInputs, torch_runtime
from tests.checkpoints import tiny_checkpoint
from tests.unit.runner.devices import device, host
from tests.unit.runner.fakes import Job, MiniScheduler, drive
from tests.unit.runner.test_graph_sampling import serve as serve_mixed
from tests.unit.runner.test_graphs import BLOCKS, real_runner, serve
from tests.unit.runner.test_lean import let_capture, with_graphs
from tests.unit.runner.test_memory import request_of

VOCABULARY, HIDDEN, ROWS = 53, 8, 5
ODD_TOKENS = np.int32(-0x55555556)  # a mask's word: 0xAAAAAAAA


class Head:
    """The head and the draw, one reference after another."""

    def __init__(self, linear: LinearSpec, draw: DrawSpec, least: int = 1, shift: int = 0) -> None:
        """``shift``: what is added to tokens, so that its use shows."""
        assert (linear.role, linear.out_features, draw.dtype) == ("lm_head", draw.vocabulary, "float32")
        self._linear, self._draw, self._least, self._shift = ReferenceLinear(linear), draw, least, shift
        self.rows: list[int] = []

    def takes(self, rows: int) -> bool:
        return rows >= self._least

    def best(self, hidden, packed):
        self.rows.append(len(hidden))
        logits = self._linear.apply(hidden, packed).float()
        inputs = inputs_of(len(hidden), all_greedy=True)
        tokens = REFERENCE[self._draw.op].make(self._draw)(logits, inputs, 0)
        values = logits.gather(1, tokens.long().unsqueeze(1)).squeeze(1)
        return (tokens + self._shift) % self._draw.vocabulary, values


def inputs_of(rows: int, **more) -> SamplingInputs:
    each = torch.zeros(rows)
    facts = {"all_greedy": False, "any_top_k": False, "any_top_p": False, "any_min_p": False, "mask": None} | more
    return SamplingInputs(
        temperature=each + (0.0 if facts["all_greedy"] else 0.7),
        top_k=each.int(),
        top_p=each + 1,
        min_p=each,
        seed=each.long(),
        position=each.int(),
        sample=each.int(),
        **facts,
    )


def claiming(backend, made: list, **options):
    """The backend with a claim on the head; ``made``: what it claimed."""

    def fuse(specs):
        if len(specs) != 2 or not isinstance(specs[1], DrawSpec):
            return None
        made.append(Head(*specs, **options))
        return Fused(count=2, provided=Provided(implementation=made[-1], label="native: head"))

    return replace(backend, fuse=fuse)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_checkpoint("gemma3", tmp_path_factory.mktemp("model") / "gemma3")


GREEDY = {"all_greedy": True}


@pytest.mark.parametrize(
    ("facts", "alternatives", "least", "used"),
    [
        (GREEDY, None, 1, True),
        (GREEDY, None, ROWS, True),
        (GREEDY, None, ROWS + 1, False),
        (GREEDY, 0, 1, False),
        (GREEDY | {"mask": torch.full((ROWS, 2), -1, dtype=torch.int32)}, None, 1, False),
        ({}, None, 1, False),
        ({"any_top_k": True}, None, 1, False),
    ],
    ids=str,
)
def test_logits_are_made_where_anything_wants_them(facts, alternatives, least, used) -> None:
    ops = Ops(host(), block_tokens=16)
    head = torch.randn(HIDDEN, VOCABULARY, generator=torch.manual_seed(0))
    spec = LinearSpec(dtype="float32", in_features=HIDDEN, out_features=VOCABULARY, role="lm_head")
    run, linear, calls = Head(spec, DrawSpec(dtype="float32", vocabulary=VOCABULARY), least), ReferenceLinear(spec), []
    packed = linear.pack(head.T.contiguous(), None)

    class Greedy:
        takes = staticmethod(run.takes)

        def __call__(self, hidden):
            return run.best(hidden, packed)

    def logits(hidden):
        calls.append(len(hidden))
        return linear.apply(hidden, packed)

    given = {"vocabulary": VOCABULARY, "fixed_shapes": False, "logits": logits}
    hidden = torch.randn(ROWS, HIDDEN, generator=torch.manual_seed(1))
    hidden[3] = float("nan")
    want = Drawer(ops, **given).run(hidden, inputs_of(ROWS, **facts), alternatives)
    assert calls == [ROWS]
    got = Drawer(ops, **given, greedy=Greedy()).run(hidden, inputs_of(ROWS, **facts), alternatives)
    assert (run.rows, calls) == (([ROWS], [ROWS]) if used else ([], [ROWS, ROWS]))
    assert torch.equal(got.tokens, want.tokens) and got.tokens.dtype == torch.int32
    assert torch.equal(got.witness.nan_to_num(7.0), want.witness.nan_to_num(7.0))
    assert got.logprobs.keys() == want.logprobs.keys()


def test_rows_whose_logits_are_changed_have_logits() -> None:
    """Greedy rows with a penalty, a bias or a ban, and those beside them in their step, are not drawn without."""
    ops, head = Ops(host(), block_tokens=16), torch.randn(HIDDEN, VOCABULARY, generator=torch.manual_seed(0))
    hidden = torch.randn(ROWS, HIDDEN, generator=torch.manual_seed(1))

    class Greedy:
        def takes(self, rows):
            return True

        def __call__(self, hidden):
            raise AssertionError("a run without logits can't see what changes them")

    drawer = Drawer(ops, vocabulary=VOCABULARY, fixed_shapes=False, logits=lambda x: x @ head, greedy=Greedy())
    shape = TableShape(num_rows=2, max_drafts=0, widths=(1,), slot_dtype="int64", adjusted=1, vocabulary=VOCABULARY)
    tables = AdjustTables(torch_runtime("cpu"), 3, shape)
    banned = int((hidden @ head)[0].argmax())
    start = AdjustStart(slot=0, tokens=np.zeros(1, np.int32), prompt=1, prompt_end=1, bad_words=((banned,),))
    tables._words[0] = torch.from_numpy(slot_words(start, VOCABULARY))
    slots = torch.ones(ROWS, dtype=torch.int32)
    slots[0] = 0
    adjust = tables.inputs(slots, torch.full((ROWS,), 40, dtype=torch.int32), (False, False, False, True))
    drawn = drawer.run(hidden, inputs_of(ROWS, **GREEDY), None, adjust)
    want = (hidden @ head).topk(2).indices
    assert drawn.tokens.tolist() == [int(want[0, 1]), *want[1:, 0].tolist()]


@pytest.mark.parametrize("kind", ["cpu", "mirage", "mirage-static"])
def test_the_engine_gives_the_tokens_of_the_ops_apart(checkpoint, kind: str, monkeypatch) -> None:
    """Replayed steps where the device has graphs, and eager ones."""
    wanted, made = serve(real_runner(checkpoint, device("cpu"), max_num_seqs=6), 1), []
    runner = real_runner(checkpoint, claiming(device(kind, native=True), made), depth=2)
    (head,) = made
    drawn, draw = [], Captured.draw
    monkeypatch.setattr(Captured, "draw", lambda self, part: (drawn.append(self.shape.rows), draw(self, part))[1])
    warm_up(runner, step_limits(runner.backend.shapes, 6, 48))
    warmed, drawer = len(head.rows), runner._sampler._drawer
    assert warmed > 0
    monkeypatch.setattr(drawer, "_logits", None)
    assert serve(runner, 2) == wanted, "without logits"
    if kind == "cpu":
        assert len(head.rows) > warmed
    else:
        assert len(drawn) > 20, "replayed graphs draw so too"
    choice = next(choice for choice in made_report(runner) if choice.op == "linear/1 + sample.draw/1")
    assert (choice.provider, choice.label, choice.count) == ("native", "native: head", 1)
    runner.close()


def made_report(runner):
    """What is bound, as a runner's own ops say it."""
    ops = Ops(runner.backend, block_tokens=runner.backend.storage.block_tokens[0])
    assert ops.fuse(runner.decoder._head.spec, DrawSpec(dtype="float32", vocabulary=runner.decoder.spec.vocabulary))
    return ops.report


def ways_of(runner: Runner) -> set[tuple[bool, bool, bool]]:
    """Filled by draws from now on: (of a replayed step's rows all at once, for more than tokens, by logits)."""
    ways, calls, drawer, inner = set(), [], runner._sampler._drawer, runner._draw
    logits = drawer._logits
    drawer._logits = lambda hidden: (calls.append(len(hidden)), logits(hidden))[1]

    def draw(flight, part, mask):
        before, asks = len(calls), bool(part.facts & (NON_GREEDY | LOGPROBS)) or mask is not None
        done = inner(flight, part, mask)
        ways.add((flight.captured is not None and part.arrays.whole, asks, len(calls) > before))
        return done

    runner._draw = draw
    return ways


def serve_changing(runner: Runner, depth: int) -> list[Job]:
    """Greedy rows, joined for a while by one that draws at random and by one that reports."""
    some = {"start": {"temperature": 0.9, "seed": 11}, "arrive": 7}, {"start": {"logprobs": 2}, "arrive": 22}
    todo = [Job(prompt=[9 + i, 60, 33 * i], max_new=36 - i) for i in range(3)]
    todo += [Job(prompt=[5, 71, 12], max_new=6, **each) for each in some]
    size, groups = runner.backend.storage.block_tokens[0], len(runner.decoder.groups)
    sched = MiniScheduler(rows=5, budget=40, block_tokens=size, num_blocks=BLOCKS, groups=groups)
    for job in todo:
        sched.add(job)
    drive(InlineExecutor(runner), sched, depth=depth)
    return todo


@pytest.mark.parametrize("kind", ["cpu", "mirage", "mirage-static"])
@pytest.mark.parametrize("serve_some", [serve_changing, serve_mixed])
def test_rows_that_ask_for_more_get_it(checkpoint, kind: str, serve_some) -> None:
    """Steps of greedy rows alone and steps with one that is not, eager and replayed."""
    wanted, made = serve_some(real_runner(checkpoint, device("cpu")), 1), []
    runner = real_runner(checkpoint, claiming(device(kind, native=True), made), depth=2)
    warm_up(runner, step_limits(runner.backend.shapes, 6, 48))
    ways = ways_of(runner)
    got = serve_some(runner, 2)
    for left, right in zip(got, wanted, strict=True):
        assert left.out == right.out and not left.error and len(left.logprobs) == len(right.logprobs)
    assert all(asks is by_logits for _, asks, by_logits in ways)
    if serve_some is serve_changing:
        assert {(kind != "cpu", False, False), (kind != "cpu", True, True)} <= ways
    runner.close()


@pytest.mark.parametrize("kind", ["cpu", "mirage", "mirage-static"])
def test_masks_and_drafts_of_greedy_rows(checkpoint, kind: str) -> None:
    """Masked rows draw by logits, rows beside them and drafts to verify without."""

    def served(backend) -> tuple[list[Job], set[tuple[bool, bool, bool]]]:
        runner = real_runner(checkpoint, backend, depth=2, max_drafts=2)
        runner._sampler._drafter = RandomDrafter(runner.decoder.spec.vocabulary, 2)
        ways, size = ways_of(runner), runner.backend.storage.block_tokens[0]
        sched = MiniScheduler(
            rows=5, budget=40, block_tokens=size, num_blocks=BLOCKS, groups=len(runner.decoder.groups), max_drafts=2
        )
        todo = [Job(prompt=[7 + i, 60, 30 + i], max_new=9, start={"max_drafts": 2 * (i % 2)}) for i in range(5)]
        todo[0].late = todo[3].late = True
        for job in todo:
            sched.add(job)
        words = -(-runner.decoder.spec.vocabulary // 32)
        drive(InlineExecutor(runner), sched, depth=2, late=lambda job: np.full(words, ODD_TOKENS, np.int32))
        runner.close()
        return todo, ways

    made: list = []
    (wanted, before), (got, after) = served(device("cpu")), served(claiming(device(kind, native=True), made))
    assert [job.out for job in got] == [job.out for job in wanted] and not any(job.error for job in got)
    for job in got:
        odd = all(token % 2 for token in job.out)
        assert len(job.out) == 9 and odd is job.late
    masked = (False, True, True)
    assert before == {masked, (False, False, True)} and after == {masked, (False, False, False)}
    assert max(made[0].rows) > sum(not job.late for job in got), "drafts are verified so too"


def test_a_wrong_claim_shows(checkpoint) -> None:
    """The tokens do come from the claim."""
    wanted, made = serve(real_runner(checkpoint, device("cpu"), max_num_seqs=6), 1), []
    assert serve(real_runner(checkpoint, claiming(device("cpu"), made, shift=1), max_num_seqs=6), 1) != wanted


def test_steps_ahead_draw_both_ways(checkpoint) -> None:
    """What is compiled ahead includes the logits of rows that graphs draw without."""
    made: list = []
    runner = real_runner(checkpoint, claiming(device("mirage", native=True), made, least=2), depth=2)
    seen, drawer = [], runner._sampler._drawer
    logits = drawer._logits
    drawer._logits = lambda hidden: (seen.append(len(hidden)), logits(hidden))[1]
    for shape in runner.graphs.shapes():
        runner.rehearse(capture_plan(runner, shape), shape)
    rows = [shape.rows for shape in runner.graphs.shapes()]
    assert seen == rows and made[0].rows == [count for count in rows if count > 1] and max(rows) > 1
    runner.close()


@pytest.mark.parametrize("capped", [False, True])
def test_a_head_whose_logits_are_capped_keeps_them(checkpoint, capped: bool) -> None:
    source = resolve(str(checkpoint))
    spec = replace(read_spec(source.config, "float32"), logit_soft_cap=30.0 if capped else None)
    made: list = []
    decoder = build(spec, Ops(claiming(host(), made), block_tokens=16))
    assert (decoder.greedy is None) is capped and len(made) == (0 if capped else 1)


def test_under_deterministic_only_an_invariant_claim_is_taken(checkpoint) -> None:
    spec, made = read_spec(resolve(str(checkpoint)).config, "float32"), []
    decoder = build(spec, Ops(claiming(host(), made), block_tokens=16, deterministic=True))
    assert made and decoder.greedy is None


def test_buckets_whose_greedy_rows_need_no_logits_are_planned_without(tmp_path, monkeypatch) -> None:
    config = resolve(str(tiny_checkpoint("gemma3", tmp_path / "gemma3"))).config
    request = with_graphs(request_of(config))
    let_capture(request, monkeypatch, "one_token")
    spec, plain = request.decoder.spec, plan_memory(request).graphs

    def planned(least: int) -> int:
        """With a head that draws ``least`` and more rows without logits; buckets hold 1 to 6."""
        monkeypatch.setattr(request.decoder, "greedy", SimpleNamespace(takes=lambda rows: rows >= least))
        return plan_memory(request).graphs

    row, hidden = spec.vocabulary * 4, 6 * spec.hidden * 4
    assert planned(7) == plain
    assert plain - planned(6) >= row and planned(6) - planned(3) >= 3 * row
    assert planned(0) >= planned(7) - 6 * row * (1 + DRAW_ELEMENT // 4) - 3 * hidden + hidden

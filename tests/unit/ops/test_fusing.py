"""Runs of ops: a claim on a whole run is taken, anything less leaves each op by itself; faults are named."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from drivetrain.errors import ConfigError, DeviceError
from drivetrain.ops import Ops
from drivetrain.ops.provided import ask_fused
from drivetrain.ops.reference.dense import ReferenceLinear
from drivetrain_api.v1 import AddRmsNormSpec, DrawSpec, Fused, GatedActivationSpec, OpTraits, Provided, RopeSpec
from tests.unit.ops.test_facade import LINEAR, NORM, attention, backend, marker, refuses

GATED = GatedActivationSpec(dtype="float32", size=1, kind="silu")
ROPE = RopeSpec(dtype="float32", head_dim=8, rotary_dim=8)
PRODUCT = (LINEAR, GATED)
HEAD = replace(LINEAR, role="lm_head"), DrawSpec(dtype="float32", vocabulary=LINEAR.out_features)


class Claims:
    """A backend's ``fuse`` with one answer, and what it was asked."""

    def __init__(self, answer) -> None:
        self.answer = answer
        self.asked: list = []

    def __call__(self, specs):
        self.asked.append(tuple(specs))
        return self.answer


def claim(implementation=None, count: int = 2, **more) -> Fused:
    made = ReferenceLinear(LINEAR) if implementation is None else implementation
    return Fused(count=count, provided=Provided(**{"implementation": made, "label": "gated", **more}))


def ops_of(fuse, **more) -> Ops:
    return Ops(replace(backend(), fuse=fuse), block_tokens=16, **more)


def entry() -> tuple:
    return NORM, ROPE, attention()


def test_a_claim_on_the_whole_run_is_taken_asked_for_once_and_counted() -> None:
    claims = Claims(claim())
    ops = ops_of(claims)
    first = ops.fuse(*PRODUCT)
    assert first is claims.answer.provided.implementation
    assert ops.fuse(LINEAR, replace(GATED)) is first, "equal specs are the same run"
    assert claims.asked == [PRODUCT] and [c.count for c in ops.report] == [2]
    assert ops.fuse(LINEAR, replace(GATED, kind="gelu_tanh")) is first
    assert len(claims.asked) == 2 and [c.count for c in ops.report] == [2, 1]


@pytest.mark.parametrize("answer", [None, claim(count=1), claim(count=3)], ids=["none", "part", "more"])
def test_less_or_more_than_the_whole_run_is_no_claim(answer) -> None:
    claims = Claims(answer)
    ops = ops_of(claims)
    assert ops.fuse(*PRODUCT) is None and ops.fuse(*PRODUCT) is None
    assert claims.asked == [PRODUCT], "a run that nobody claimed is not asked for again"
    assert ops.report == ()
    assert isinstance(ops.bind(LINEAR), ReferenceLinear)
    assert ask_fused(ops.backend, PRODUCT) is None


def test_a_backend_that_names_no_claims_has_none() -> None:
    assert Ops(backend(), block_tokens=16).fuse(*entry()) is None


def test_the_run_is_reported_by_its_ops_after_what_is_bound() -> None:
    ops = ops_of(lambda specs: claim(marker, count=3, label="shared: entry") if len(specs) == 3 else None)
    run = entry()
    assert ops.fuse(*run) is marker
    ops.bind(LINEAR)
    bound, fused = ops.report
    assert bound.op == "linear/1"
    assert (fused.op, fused.spec) == ("norm.rms/1 + rope.apply/1 + attention.paged/1", run[-1])
    assert (fused.provider, fused.label, fused.reason, fused.count) == ("shared", "shared: entry", "", 1)


def test_deterministic_takes_invariant_runs_only() -> None:
    invariant = OpTraits(batch_invariant=True)
    taken = ops_of(Claims(claim(traits=invariant)), deterministic=True)
    assert taken.fuse(*PRODUCT) is not None and taken.report[0].traits == invariant
    left = ops_of(Claims(claim()), deterministic=True)
    assert left.fuse(*PRODUCT) is None and left.report == ()
    assert ops_of(Claims(claim())).fuse(*PRODUCT) is not None


@pytest.mark.parametrize(
    ("fuse", "run", "expected"),
    [
        (refuses("boom"), PRODUCT, r"raised RuntimeError: boom \(.*test_facade"),
        (lambda s: "x", PRODUCT, "returned str 'x', expected Fused or None"),
        (lambda s: claim().provided, PRODUCT, "returned an object of type Provided, expected Fused or None"),
        (lambda s: Fused(count=2, provided=None), PRODUCT, "returned an object of type Fused, expected Fused or None"),
        (lambda s: claim(marker), PRODUCT, "it has no packed_bytes, pack, apply"),
        (lambda s: claim(label=None), PRODUCT, "gave the label None, expected text"),
        (lambda s: claim(traits=5), PRODUCT, "the traits int 5, expected OpTraits"),
        (lambda s: claim(), HEAD, "expected an object with takes, best: it has no takes, best"),
        (lambda s: claim(5, count=3), None, "the implementation int 5, expected a callable"),
    ],
)
def test_what_can_not_be_bound_names_wheel_and_ops(fuse, run, expected: str) -> None:
    run = run or entry()
    ops, first = r" \+ ".join(spec.op for spec in run), type(run[0]).__name__
    with pytest.raises(DeviceError, match=rf"the backend: fuse\({ops}\) .*{expected}.*asked for \({first}"):
        ops_of(fuse).fuse(*run)


def test_the_engines_own_errors_pass_through() -> None:
    def fuse(specs):
        raise ConfigError("this option forbids it")

    with pytest.raises(ConfigError, match=r"^this option forbids it"):
        ops_of(fuse).fuse(*PRODUCT)


def test_what_was_taken_computes() -> None:
    made = ops_of(Claims(claim())).fuse(*PRODUCT)
    packed = made.pack(torch.ones(2, 4), None)
    assert made.apply(torch.ones(3, 4), packed).tolist() == [[4.0, 4.0]] * 3


def test_a_watched_run_is_noted_by_all_its_ops() -> None:
    def broken(*given):
        raise RuntimeError("boom")

    watched = (ops := ops_of(Claims(claim(broken, count=3)))).watched()
    assert watched.fuse(*entry()) is broken, "what was not bound yet is not watched"
    ops.fuse(*entry())
    with pytest.raises(
        DeviceError, match=r"norm\.rms/1 \+ rope\S* \+ attention\S* by 'gated': it raised RuntimeError: boom"
    ):
        ops.watched().fuse(*entry())()


def test_a_watched_run_gives_attentions_result() -> None:
    ops = ops_of(Claims(claim(lambda x, *given: x, count=3)))
    ops.fuse(*entry())
    watched = ops.watched()
    heads = entry()[-1].num_heads
    assert watched.fuse(*entry())(torch.ones(5, heads, 8)).shape == (5, heads, 8)
    with pytest.raises(DeviceError, match=r"it returned .* expected float32"):
        watched.fuse(*entry())(torch.ones(5, heads + 1, 8))


def test_a_watched_product_gives_the_size_of_what_it_activates() -> None:
    class Product(ReferenceLinear):
        def apply(self, x, packed):
            return torch.zeros(len(x), width)

    ops = ops_of(Claims(claim(Product(LINEAR))))
    ops.fuse(*PRODUCT)
    watched = ops.watched()
    width = GATED.size
    assert watched.fuse(*PRODUCT).apply(torch.ones(3, 8), None).shape == (3, width) and not watched.failures
    width += 1
    with pytest.raises(DeviceError, match="expected float32"):
        watched.fuse(*PRODUCT).apply(torch.ones(3, 8), None)
    assert len(watched.failures) == 1


def test_a_watched_product_behind_a_norm_gives_the_sum_too() -> None:
    class Product(ReferenceLinear):
        def apply(self, x, residual, weight, packed):
            kept = x.float() if residual is None else x + residual
            return torch.zeros(len(x), LINEAR.out_features), kept.to(stream)

    run = (AddRmsNormSpec(dtype="float32", size=LINEAR.in_features, eps=1e-6), LINEAR)
    ops = ops_of(Claims(claim(Product(LINEAR))))
    ops.fuse(*run)
    made, (x, stream) = ops.watched().fuse(*run), (torch.ones(3, LINEAR.in_features), torch.float32)
    for residual in (None, x, x.double()):
        stream = torch.float64 if residual is not None and residual.dtype == torch.float64 else torch.float32
        made.apply(x, residual, x[0], None)
    stream = torch.bfloat16
    with pytest.raises(DeviceError, match=r"apply returned \(float32 .*bfloat16 .*, expected \(float32"):
        made.apply(x, x, x[0], None)
    with pytest.raises(DeviceError, match="it has no packed_bytes, pack, apply"):
        ops_of(Claims(claim(marker))).fuse(*run)


class Gated(ReferenceLinear):
    """A gated run's implementation: up to 100 tokens its product lies in memory."""

    said: object = 100

    def apart_tokens(self, most):
        if isinstance(self.said, Exception):
            raise self.said
        return min(self.said, most) if isinstance(self.said, int) and self.said >= 0 else self.said


def test_a_gated_run_says_for_which_tokens_its_product_lies_in_memory():
    implementation = Gated(LINEAR)
    ops = ops_of(Claims(claim(implementation)))
    assert ops.gated_apart(4096) == 4096, "nothing is bound yet"
    ops.fuse(*PRODUCT)
    assert ops.gated_apart(4096) == 100 and ops.gated_apart(7) == 7
    for said, text in (
        (-1, "returned int -1, expected 0 to 50"),
        ("all", "returned str 'all'"),
        (ValueError("no"), "no"),
    ):
        implementation.said = said
        with pytest.raises(DeviceError, match="apart_tokens of 'gated'") as refused:
            ops.gated_apart(50)
        assert text in str(refused.value)


def test_a_gated_run_that_says_nothing_holds_its_product_always():
    ops = ops_of(Claims(claim()))
    ops.fuse(*PRODUCT)
    assert ops.gated_apart(4096) == 4096


def test_a_watched_head_gives_tokens_and_their_logits() -> None:
    class Head:
        def takes(self, rows):
            return rows > 1

        def best(self, hidden, packed):
            return torch.zeros(len(hidden), dtype=torch.int32), torch.zeros(len(hidden), dtype=kind)

    ops, kind = ops_of(Claims(claim(Head()))), torch.float32
    ops.fuse(*HEAD)
    watched = ops.watched()
    head = watched.fuse(*HEAD)
    assert head.takes(2) and not head.takes(1)
    assert [each.shape for each in head.best(torch.ones(3, 8), None)] == [(3,), (3,)] and not watched.failures
    kind = torch.bfloat16
    with pytest.raises(DeviceError, match=r"best returned \(int32 \[3\], bfloat16 \[3\]\), expected .*float32 \[3\]"):
        head.best(torch.ones(3, 8), None)


def test_of_several_gated_runs_the_one_that_holds_its_product_longest_counts():
    few, many, wide = Gated(LINEAR), Gated(LINEAR), replace(GATED, size=2)
    many.said = 300
    claims = Claims(claim(few))
    ops = ops_of(claims)
    ops.fuse(*PRODUCT)
    claims.answer = claim(many)
    ops.fuse(LINEAR, wide)
    assert ops.gated_apart(4096) == 300 and ops.gated_apart(200) == 200


def test_a_declined_gated_run_lies_in_memory_for_all_tokens():
    claims = Claims(claim(Gated(LINEAR)))
    ops = ops_of(claims)
    ops.fuse(*PRODUCT)
    claims.answer = None
    other = replace(GATED, size=2)
    assert ops.fuse(LINEAR, other) is None and ops.gated_apart(4096) == 100, "it may be claimed otherwise"
    ops.bind(other)
    assert ops.gated_apart(4096) == 4096

"""The static profile: finite buckets, and nothing new after ready."""

from __future__ import annotations

from typing import Any

from drivetrain_api.v1 import ConfigView, LinearSpec, ShapePolicy

from .rules import RuleError
from .storage import BLOCK_TOKENS

UNKNOWN_LENGTH = 32_768
SMALL_ROWS, MIDDLE_TOKENS, SMALL_BLOCKS = 8, 128, 4
WORTH = 4


def shape_policy(view: ConfigView) -> ShapePolicy:
    """Return few buckets, the largest of which hold the configuration's largest step; one row more than it has
    requests, which carries padded tokens."""
    length = view.max_model_len or UNKNOWN_LENGTH
    rows = _up_to(view.max_num_seqs + 1, SMALL_ROWS)
    tokens = tuple(sorted({*rows, *_up_to(max(view.max_num_batched_tokens, rows[-1]), MIDDLE_TOKENS)}))
    blocks = _up_to(-(-length // BLOCK_TOKENS), SMALL_BLOCKS)
    return ShapePolicy(
        tokens=tokens,
        rows=rows,
        blocks_per_row=blocks,
        compile_budget=len(tokens) * len(rows) * len(blocks),
    )


def _up_to(largest: int, smaller: int) -> tuple[int, ...]:
    """Return the largest size, and before it the smaller one where it saves much: each bucket costs warm-up steps."""
    return (smaller, largest) if smaller * WORTH <= largest else (largest,)


class ShapeGuard:
    """Refuses shapes outside the buckets, more shapes than the budget, and new ones after ready.

    A shape of attention is (tokens, rows, blocks a row); of a linear, its rows: tokens of the step, or logits rows,
    which are padded to a row bucket or a token bucket. ``late_signatures``: torch ops queued after ready with shapes
    that were never seen before it; refused too where ``strict``.
    """

    def __init__(self, policy: ShapePolicy, strict: bool) -> None:
        self.policy = policy
        self.compiled: set[tuple[int, int, int]] = set()
        self.late_signatures = 0
        self._row_counts = frozenset((*policy.tokens, *policy.rows))
        self._seen: set[tuple[Any, ...]] = set()
        self._strict = strict
        self._ready = False

    def ready(self) -> None:
        """From here on nothing is compiled."""
        self._ready = True

    def rows(self, spec: LinearSpec, count: int) -> None:
        """Check a linear."""
        if count not in self._row_counts:
            raise RuleError(
                "shape-buckets",
                f"a {spec.role} linear over {count} rows",
                f"pad to one of {sorted(self._row_counts)}",
            )
        self._new(("linear", spec, count), f"a {spec.role} linear over {count} rows")

    def step(self, tokens: int, rows: int, blocks: int) -> None:
        """Check a step's attention."""
        policy = self.policy
        for what, size, buckets in (
            ("tokens", tokens, policy.tokens),
            ("rows", rows, policy.rows),
            ("blocks a row", blocks, policy.blocks_per_row),
        ):
            if size not in buckets:
                raise RuleError("shape-buckets", f"a step of {size} {what}", f"pad to one of {list(buckets)}")
        shape = (tokens, rows, blocks)
        if shape in self.compiled:
            return
        self._new(shape, f"a step of {tokens} tokens, {rows} rows, {blocks} blocks a row")
        if len(self.compiled) >= policy.compile_budget:
            raise RuleError(
                "compile-budget",
                f"{shape} would be shape {len(self.compiled) + 1} of {policy.compile_budget}",
                "warm up fewer shapes",
            )
        self.compiled.add(shape)

    def capture(self) -> None:
        """Check a graph capture."""
        if self._ready:
            raise RuleError("no-late-compile", "a graph was captured after ready", "capture during warm-up")

    def watch(self, signature: tuple[Any, ...]) -> None:
        """See a torch op."""
        if signature in self._seen:
            return
        if self._ready:
            self.late_signatures += 1
            if self._strict:
                raise RuleError(
                    "no-late-compile", f"{signature[0]} with new shapes", "warm up every shape before ready"
                )
        self._seen.add(signature)

    def _new(self, key: tuple[Any, ...], what: str) -> None:
        if key in self._seen:
            return
        if self._ready:
            raise RuleError(
                "no-late-compile", f"{what} was not seen before ready", "run every shape of the buckets in warm-up"
            )
        self._seen.add(key)

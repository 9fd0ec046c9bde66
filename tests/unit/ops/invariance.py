"""A row's bits must not depend on the batch: shared by the reference's and the backend's tests."""

import torch

from drivetrain.ops.cases.attention import Shape, fill_cache, make_batch, make_rows, make_spec
from drivetrain.ops.cases.source import Source, on


def check_rows(apply, x, others, sizes=(1, 2, 5, 15, 16, 17, 31, 32, 33, 48, 70)):
    """``apply`` rows -> rows. Row ``x`` must give the same bits at any place of any batch with any neighbours."""
    alone = apply(x.unsqueeze(0))[0]
    for size in sizes:
        for place in sorted({0, size // 2, size - 1}):
            batch = others[torch.arange(size) % len(others)].clone()
            batch[place] = x
            got = apply(batch)[place]
            assert torch.equal(got, alone), f"row {place} of {size} differs from the row alone"
    return alone


def check_all_sizes(apply, x, others):
    """Every batch size 1 .. 70, the row last."""
    alone = apply(x.unsqueeze(0))[0]
    for size in range(1, 71):
        batch = others[torch.arange(size) % len(others)].clone()
        batch[-1] = x
        assert torch.equal(apply(batch)[-1], alone), f"the last row of {size} differs from the row alone"


SHAPES = (
    Shape(heads=4, kv_heads=2, head_dim=16, v_head_dim=16),
    Shape(heads=4, kv_heads=1, head_dim=64, v_head_dim=64, window=40),
    Shape(heads=3, kv_heads=3, head_dim=20, v_head_dim=12, soft_cap=3.0, sinks=True),
    Shape(heads=1, kv_heads=1, head_dim=32, v_head_dim=32),
)


class Sequence:
    """One request's q, k and v, to be computed in any batch and any chunks."""

    def __init__(self, place, shape, dtype, length, seed):
        self.place, self.length = place, length
        self.spec = make_spec(place, shape, dtype)
        self.source = Source(dtype, seed)
        self.q = self.source.normal(length, shape.heads, shape.head_dim)
        self.k = self.source.normal(length, shape.kv_heads, shape.head_dim)
        self.v = self.source.normal(length, shape.kv_heads, shape.v_head_dim)
        self.sinks = self.source.normal(shape.heads) if shape.sinks else None

    def chunk(self, attention, first, end, others=(), slack=0):
        """Attend with tokens first .. end - 1, with other rows (length, queries) around it."""
        before = tuple(r for r in others if r[1] <= end - first)
        after = tuple(r for r in others if r[1] > end - first)
        rows = make_rows(
            (*before, (end, end - first), *after), self.spec.layout.block_tokens, slack, self.source.random
        )
        mine = len(before)
        shape = (self.spec.num_kv_heads, self.spec.head_dim), (self.spec.num_kv_heads, self.spec.v_head_dim)
        keys = [self.source.normal(max(n, q), *shape[0]) for n, q in zip(rows.lengths, rows.queries, strict=True)]
        values = [self.source.normal(max(n, q), *shape[1]) for n, q in zip(rows.lengths, rows.queries, strict=True)]
        keys[mine], values[mine] = self.k[:end], self.v[:end]
        q = self.source.normal(sum(rows.queries), self.spec.num_heads, self.spec.head_dim)
        at = sum(rows.queries[:mine])
        q[at : at + end - first] = self.q[first:end]
        cache = fill_cache(self.place, self.spec, rows, keys, values)
        plan = attention.plan(make_batch(self.place, rows, self.spec.layout.slot_dtype))
        new = [
            [p[len(p) - n :] if n else p[:0] for p, n in zip(ps, rows.queries, strict=True)] for ps in (keys, values)
        ]
        attention.write(cache, on(self.place, torch.cat(new[0])), on(self.place, torch.cat(new[1])), plan)
        out = attention.forward(on(self.place, q), cache, plan, on(self.place, self.sinks))
        return out[at : at + end - first]


def check_attention(make, place, shape, dtype, length=150):
    """One by one, in chunks, whole, and with other rows: always the same bits."""
    sequence = Sequence(place, shape, dtype, length, 9)
    attention = make(sequence.spec)
    whole = sequence.chunk(attention, 0, length)
    assert whole.isfinite().all()
    for at in (0, 1, 15, 16, 63, 64, 65, 130, length - 1):
        assert torch.equal(sequence.chunk(attention, at, at + 1)[0], whole[at]), f"alone at {at}"
        mixed = sequence.chunk(attention, at, at + 1, ((40, 1), (7, 1), (300, 1), (90, 33), (0, 1)), slack=5)
        assert torch.equal(mixed[0], whole[at]), f"in a batch at {at}"
    for first, end in ((0, 37), (37, 64), (64, 101), (101, length), (16, 20)):
        got = sequence.chunk(attention, first, end, ((33, 1), (64, 3), (200, 60)), slack=2)
        assert torch.equal(got, whole[first:end]), f"chunk {first} .. {end}"

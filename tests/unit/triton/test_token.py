"""Decode rows from the q/k/v product to attention's result in one kernel, against the references one after another."""

from dataclasses import replace

import pytest
import torch

from drivetrain.ops.cases import attention as cases
from drivetrain.ops.cases.source import Source
from drivetrain.ops.reference import REFERENCE, Place
from drivetrain_api.v1 import RmsNormSpec, RopeSpec, torch_runtime, torch_storage
from drivetrain_triton.attention_choice import Tiles, decode_tiles
from drivetrain_triton.target import INTERPRETER, Target
from tests.unit.triton.interpreted import interpreted

with interpreted():
    from drivetrain_triton import attention, attention_rotate

RUNTIME = torch_runtime("cpu")
PLACE = Place(runtime=RUNTIME, storage=torch_storage(RUNTIME, (16,), "int32"))
NORM, ROPE, ATTENTION = (REFERENCE[name] for name in ("norm.rms/1", "rope.apply/1", "attention.paged/1"))
STEP = {"bfloat16": 1.6e-2, "float16": 2e-3, "float32": 1e-5}
NARROW = replace(INTERPRETER, multiprocessors=1)  # one share a row, whatever its length
WIDE = replace(INTERPRETER, multiprocessors=64)  # several
AHEAD, STAGED = Tiles(16, 32, 4, 3, ahead=True), Tiles(16, 64, 4, 2)
ROWS = ((5, 1), (1, 1), (70, 1), (64, 1), (65, 1), (0, 1), (140, 1))


@pytest.fixture(autouse=True)
def poisoned():
    """New tensors are full of NaN, so that what a kernel leaves unwritten shows."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


class Setting:
    """A fused run, its references, and the inputs of one step; caches hold NaN but for the keys before the step."""

    def __init__(
        self, rows=ROWS, dtype="float32", normed=True, rotary=None, style="halves", norm=None, seed=3, **shape
    ):
        size = shape.pop("size", 16)
        sizes = {"heads": 4, "kv_heads": 2, "head_dim": size, "v_head_dim": size} | shape
        self.spec = spec = cases.make_spec(PLACE, cases.Shape(**sizes), dtype)
        self.rope = RopeSpec(dtype=dtype, head_dim=size, rotary_dim=rotary or size, style=style)
        self.norm = RmsNormSpec(dtype=dtype, size=size, eps=1e-6, **(norm or {})) if normed else None
        source = Source(dtype, seed)
        self.rows = made = cases.make_rows(rows, 16, 2, source.random)
        self.batch = cases.make_batch(PLACE, made, "int32")
        self.past = [[source.normal(max(n, 1), spec.num_kv_heads, size) for n, _ in rows] for _ in range(2)]
        turned = spec.num_heads + spec.num_kv_heads
        tokens = self.batch.num_tokens
        self.x = source.normal(tokens, (turned + spec.num_kv_heads) * size + 16, scale=2.0)[:, 16:]
        self.x = self.x.unflatten(1, (-1, size))
        self.weight = source.normal(turned, size) if normed else None
        angle = source.normal(tokens, self.rope.rotary_dim // 2, dtype="float32")
        self.cos, self.sin = angle.cos(), angle.sin()
        self.sinks = source.normal(spec.num_heads) if spec.sinks else None

    def cache(self):
        return cases.fill_cache(PLACE, self.spec, self.rows, *self.past)

    def wanted(self):
        """-> the result and the cache of the references."""
        spec, cache = self.spec, self.cache()
        turned, v = self.x.split((spec.num_heads + spec.num_kv_heads, spec.num_kv_heads), 1)
        if self.norm is not None:
            turned = NORM.make(self.norm)(turned, self.weight)
        q, k = ROPE.make(self.rope)(turned, self.cos, self.sin).split((spec.num_heads, spec.num_kv_heads), 1)
        made = ATTENTION.make(spec)
        plan = made.plan(self.batch)
        made.write(cache, k, v, plan)
        return made.forward(q, cache, plan, self.sinks), cache

    def fused(self, target=INTERPRETER):
        run = [each for each in (self.norm, self.rope, self.spec) if each is not None]
        claim = attention_rotate.fuse_rotate(run, target)
        assert claim.count == len(run)
        return claim.provided.implementation

    def planner(self, target=INTERPRETER, tiles=None):
        made = attention.TritonAttention(self.spec, target)
        made.decode_tiles = tiles
        return made

    def run(self, fused, plan, cache):
        return fused(self.x, self.weight, self.cos, self.sin, cache, plan, self.sinks)


def compare(setting, target=INTERPRETER, tiles=None, kernels=("token_kernel",)):
    """-> the plan. Results and caches as the references', all else in the cache untouched."""
    want, want_cache = setting.wanted()
    cache = setting.cache()
    before = [part.clone() for part in cache.parts]
    plan = setting.planner(target, tiles).plan(setting.batch)
    with launches() as launched:
        out = setting.run(setting.fused(target), plan, cache)
    assert tuple(launched) == kernels
    step = STEP[setting.spec.dtype]
    torch.testing.assert_close(out, want, rtol=step, atol=step)
    written = setting.batch.slots_dev[setting.batch.slots_dev > 0].long()
    pairs = list(zip(cache.parts, want_cache.parts, before, strict=True))
    for part, wanted, old in pairs:
        flat, right = part.flatten(0, 1), wanted.flatten(0, 1)
        torch.testing.assert_close(flat[written], right[written], rtol=step / 2, atol=step / 2)
        rest = torch.ones(len(flat), dtype=torch.bool)
        rest[written] = rest[:16] = False  # block 0 belongs to nobody
        torch.testing.assert_close(flat[rest], old.flatten(0, 1)[rest], rtol=0, atol=0, equal_nan=True)
    assert torch.equal(pairs[1][0].flatten(0, 1)[written], pairs[1][1].flatten(0, 1)[written])
    assert plan.decode is None or plan.decode.arrivals is None or not plan.decode.arrivals.any()
    return plan


class launches:
    """Names of the kernels that run inside."""

    PLACES = ((attention, ("token_kernel", "decode_kernel", "prefill_kernel", "merge_kernel")),)

    def __enter__(self):
        self.patch, names = pytest.MonkeyPatch(), []
        for module, kernels in (*self.PLACES, (attention_rotate, ("rotate_kernel",))):
            for kernel in kernels:
                self.patch.setattr(module, kernel, Noted(getattr(module, kernel), kernel, names))
        return names

    def __exit__(self, *_):
        self.patch.undo()


class Noted:
    def __init__(self, kernel, name, names):
        self.kernel, self.name, self.names = kernel, name, names

    def __getitem__(self, grid):
        self.names.append(self.name)
        return self.kernel[grid]


@pytest.mark.parametrize("tiles", [AHEAD, STAGED])
@pytest.mark.parametrize("target", [NARROW, WIDE])
@pytest.mark.parametrize("rules", [{}, {"window": 70}, {"window": 1}, {"window": 33, "sinks": True}, {"soft_cap": 3.0}])
def test_shares(tiles, target, rules):
    """Last positions at every place of a tile, windows that begin inside one, shares that a row does not have."""
    plan = compare(Setting(**rules), target, tiles)
    assert plan.decode.splits > 1 or target is NARROW or rules.get("window") == 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("normed", [False, True])
def test_dtypes(dtype, normed):
    for size in (16, 128):
        compare(Setting(dtype=dtype, size=size, normed=normed), WIDE)


@pytest.mark.parametrize("norm", [{"offset": 1.0}, {"round_before_weight": True, "offset": 1.0}])
def test_norms(norm):
    compare(Setting(dtype="bfloat16", size=32, norm=norm))


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(
    ("size", "rotary", "style"), [(64, 32, "halves"), (80, 40, "interleaved"), (80, 80, "halves"), (96, 24, "halves"),
                                  (256, 64, "interleaved")]
)  # fmt: skip
def test_parts_of_heads(size, rotary, style, normed):
    compare(Setting(((40, 1), (33, 1)), "bfloat16", normed, rotary, style, size=size))


@pytest.mark.parametrize(("heads", "kv_heads"), [(3, 3), (14, 2), (16, 1), (15, 1)])
def test_groups(heads, kv_heads):
    """A group that fills the tile has no row left for the key: the tile grows."""
    compare(Setting(((40, 1), (200, 1), (1, 1)), heads=heads, kv_heads=kv_heads, sinks=True), WIDE)


def test_other_rows_take_two_kernels():
    compare(Setting(((40, 1), (30, 9))), kernels=("rotate_kernel", "decode_kernel", "prefill_kernel"))
    compare(Setting(((9, 9),)), kernels=("rotate_kernel", "prefill_kernel"))
    compare(Setting(((0, 1), (0, 0))))


def test_rows_without_tokens():
    compare(Setting(((40, 1), (0, 1), (0, 0))))


def test_a_row_of_no_length_stores_nothing():
    setting = Setting(((0, 1), (3, 1)))
    cache = setting.cache()
    plan = setting.planner().plan(setting.batch)
    out = setting.run(setting.fused(), plan, cache)
    assert not out[0].any() and cache.parts[0][0].isnan().all() and cache.parts[1][0].isnan().all()


def test_captured_plan_serves_other_lengths():
    """A plan made at the largest bounds keeps its tensors; only their contents change between replays."""
    setting = Setting(((200, 1), (130, 1)))
    plan = setting.planner(WIDE).plan_for_capture(setting.batch)
    fused = setting.fused(WIDE)
    for lengths in ((200, 130), (33, 64), (65, 0), (1, 1)):
        rows = replace(setting.rows, lengths=lengths)
        setting.rows = rows
        setting.batch.lengths_dev.copy_(torch.tensor(lengths))
        setting.batch.slots_dev.copy_(torch.tensor(rows.query_slots()))
        setting.batch.positions_dev.copy_((torch.tensor(lengths) - 1).clamp(min=0))
        want, _ = setting.wanted()
        torch.testing.assert_close(setting.run(fused, plan, setting.cache()), want, rtol=1e-5, atol=1e-5)


def test_fp8_cache():
    """The new token is attended to as a read from the cache would give it."""
    setting = Setting(((40, 1), (2, 1)), "bfloat16", normed=False)
    parts = tuple(replace(part, dtype="float8_e4m3fn") for part in setting.spec.layout.spec.parts)
    layout = PLACE.storage.layout(replace(setting.spec.layout.spec, parts=parts), 16)
    setting.spec = replace(setting.spec, layout=layout)
    # Values that fp8 holds, and angles of zero: the interpreter's own conversion does not round to nearest.
    setting.x = setting.x.to(torch.float8_e4m3fn).to(torch.bfloat16)
    setting.cos, setting.sin = torch.ones_like(setting.cos), torch.zeros_like(setting.sin)
    want, _ = setting.wanted()
    out = setting.run(setting.fused(), setting.planner().plan(setting.batch), setting.cache())
    torch.testing.assert_close(out, want, rtol=1.6e-2, atol=1.6e-2)


def test_tiles_by_programs():
    target = Target(kind="cuda", arch=90, multiprocessors=132, shared_bytes=227 << 10)
    spec = cases.make_spec(PLACE, cases.Shape(heads=32, kv_heads=8, head_dim=128, v_head_dim=128), "bfloat16")
    wide = cases.make_spec(PLACE, cases.Shape(heads=8, kv_heads=4, head_dim=256, v_head_dim=256), "bfloat16")
    assert decode_tiles(spec, target, 8, True) == Tiles(16, 32, 4, 3, ahead=True)
    assert decode_tiles(spec, target, 512, True) == Tiles(16, 32, 2, 3, ahead=True)
    assert decode_tiles(spec, target, 2048, True) == Tiles(16, 16, 1, 3, ahead=True)
    assert decode_tiles(spec, target, 512, False) == Tiles(16, 64, 4, 2)
    assert decode_tiles(spec, target, 2048, False) == Tiles(16, 32, 2, 3)
    assert {decode_tiles(wide, target, n, True) for n in (8, 512, 2048)} == {Tiles(16, 32, 4, 2)}

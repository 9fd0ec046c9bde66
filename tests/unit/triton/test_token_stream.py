"""Decode attention by bulk copies: what the compiler makes of it, and its PTX run on the host against float64."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from drivetrain_api.v1 import AttentionSpec, CacheLayout, CachePart, CacheSpec
from drivetrain_triton.attention_choice import decode_stream
from drivetrain_triton.target import Target
from tests.unit.triton.ptx import Machine, Program, bits_of, floats_of

ROOT = Path(__file__).resolve().parents[3]
KERNELS = ("one warp", "one warp, two shares", "two warps", "four warps, shares", "four warps, short shares",
           "eight warps", "eight warps, one stage")  # fmt: skip
SHARED, REGISTERS, PARAMETER = 227 << 10, 65536, "token_stream_kernel_param_"
NAN, FIRST = 0x7FC0, 4096  # bfloat16; before the first place lies nothing


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """-> the folder with PTX, and facts by name. In a process of its own: here kernels may be interpreted."""
    folder = tmp_path_factory.mktemp("ptx")
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(folder / "cache")
    command = [sys.executable, "-m", "tests.unit.triton.compiled_token", str(folder)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder, {fact["name"]: fact for fact in map(json.loads, done.stdout.splitlines())}


def test_resources(compiled):
    facts = compiled[1]
    assert tuple(facts) == KERNELS
    for fact in facts.values():
        assert fact["stack"] <= 16 and fact["shared"] <= SHARED and fact["waits"] == 1, fact
        assert fact["fragments"] > 0 and fact["products"] > 0 and fact["copies"] > 0, fact
    one = facts["one warp"]  # so many programs on a multiprocessor
    assert 7 * 32 * one["registers"] <= REGISTERS and 7 * (one["shared"] + 1024) <= SHARED + 1024, one


class Step:
    """A decode step's inputs in the device's memory. Slots that no row has hold NaN, as do the new tokens'."""

    def __init__(self, settings, lengths, splits, seed):
        self.settings, self.lengths, self.splits = settings, lengths, splits
        self.random = random = np.random.default_rng(seed)
        heads, kv_heads, half = settings["HEADS"], settings["HEADS"] // settings["GROUP"], settings["HALF"]
        rows, blocks = len(lengths), [-(-length // 16) for length in lengths]
        self.memory, self.end, self.places = np.zeros(1 << 23, np.uint8), FIRST, {}
        self.pool = np.full((sum(blocks) + 1, 2, 16, kv_heads, 128), NAN, np.uint16)
        self.tables = np.full((rows, max(blocks) + 1), 7777, np.int32)  # past a row's blocks: no block at all
        order, self.slots, self.past = list(random.permutation(sum(blocks)) + 1), np.zeros(rows, np.int32), []
        for row, length in enumerate(lengths):
            self.tables[row, : blocks[row]] = [order.pop() for _ in range(blocks[row])]
            past = bits_of(random.standard_normal((max(length - 1, 0), 2, kv_heads, 128)))
            at = np.arange(len(past))
            self.pool[self.tables[row, at // 16], :, at % 16] = past
            self.slots[row] = self.tables[row, (length - 1) // 16] * 16 + (length - 1) % 16 if length else 0
            self.past.append(floats_of(past))
        self.x = bits_of(2 * random.standard_normal((rows, heads + 2 * kv_heads, 128)))
        self.weight = bits_of(random.standard_normal((heads + kv_heads, 128)))
        angle = random.standard_normal((rows, half))
        self.cos, self.sin = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
        self.put("out", np.full((rows, heads, 128), NAN, np.uint16))
        self.put("partial", np.full((rows, heads, splits, 128), np.nan, np.float32))
        self.put("lse", np.full((rows, heads, splits), np.nan, np.float32))
        self.put("arrivals", np.zeros((rows, kv_heads), np.int32))
        self.put("pool", self.pool)
        self.writable = [(FIRST, self.end)]
        for name in ("x", "weight", "cos", "sin", "slots", "tables"):
            self.put(name, getattr(self, name))
        self.put("lengths", np.array(lengths, np.int32))

    def put(self, name, array):
        raw = np.ascontiguousarray(array).view(np.uint8).reshape(-1)
        self.places[name] = self.end, array.shape, array.dtype
        self.memory[self.end : self.end + len(raw)] = raw
        self.end += -(-len(raw) // 256) * 256

    def read(self, name):
        begin, shape, kind = self.places[name]
        return self.memory[begin:][: int(np.prod(shape)) * kind.itemsize].view(kind).reshape(shape)

    def run(self, program, late):
        place = {name: begin for name, (begin, *_) in self.places.items()}
        rows, width = (len(self.pool) - 1) * 32 + 16, self.pool.shape[3] * 128
        values = place["pool"] + 16 * width * 2
        box = [0, rows, width, width, 1]
        scale, eps = (int(np.float32(number).view(np.uint32)) for number in (128**-0.5, 1e-6))
        given = [place[name] for name in ("out", "partial", "lse", "arrivals", "x", "weight", "cos", "sin")]
        given += [*box, *box, place["pool"], values, place["slots"], place["lengths"], place["tables"]]
        given += [self.tables.shape[1], self.tables.shape[1], self.x.shape[1] * 128, scale, eps, 0, 0]
        assert len(given) == len(program.params)
        boxes = {f"{PARAMETER}8": (place["pool"], rows, width), f"{PARAMETER}13": (values, rows, width)}
        machine = Machine(
            program, 32 * self.settings["num_warps"], self.memory,
            {f"{PARAMETER}{number}": value for number, value in enumerate(given)}, boxes, self.writable, late,
        )  # fmt: skip
        grid = self.pool.shape[3], len(self.lengths), self.splits
        for place in np.ndindex(*grid[::-1]):
            machine.run(place[::-1], grid)

    def turned(self):
        """Query and key heads, normed and rotated, in float64 but rounded after each."""
        half, heads = self.settings["HALF"], self.settings["HEADS"] + self.pool.shape[3]
        y = floats_of(self.x[:, :heads]).astype(np.float64)
        if self.settings["NORM"]:
            y = y / np.sqrt((y * y).mean(-1, keepdims=True) + 1e-6) * floats_of(self.weight)
            y = floats_of(bits_of(y)).astype(np.float64)
        halves = self.settings["HALVES"]
        first = slice(half) if halves else slice(0, 2 * half, 2)
        second = slice(half, 2 * half) if halves else slice(1, 2 * half, 2)
        made, cos, sin = y.copy(), self.cos[:, None], self.sin[:, None]
        made[..., first] = y[..., first] * cos - y[..., second] * sin
        made[..., second] = y[..., second] * cos + y[..., first] * sin
        return floats_of(bits_of(made)).astype(np.float64)

    def check(self):
        """Results, the new keys and values, and that nothing else was touched."""
        made, heads, group = self.turned(), self.settings["HEADS"], self.settings["GROUP"]
        got, pool, expected = floats_of(self.read("out")), self.read("pool"), self.pool.copy()
        new = floats_of(self.x[:, heads + self.pool.shape[3] :])
        for row, length in enumerate(self.lengths):
            if not length:
                assert not got[row].any()
                continue
            at = self.slots[row] // 16, slice(None), self.slots[row] % 16
            keys = np.concatenate((self.past[row][:, 0], made[row, None, heads:])).repeat(group, 1)
            values = np.concatenate((self.past[row][:, 1], new[row, None])).repeat(group, 1)
            scores = np.einsum("hd,thd->ht", made[row, :heads], keys) * 128**-0.5
            weights = np.exp(scores - scores.max(1, keepdims=True))
            want = np.einsum("ht,thd->hd", weights / weights.sum(1, keepdims=True), values)
            assert np.linalg.norm(got[row] - want) < 6e-3 * np.linalg.norm(want), (row, length)
            stored = floats_of(pool[at])
            assert np.linalg.norm(stored[0] - made[row, heads:]) < 6e-3 * np.linalg.norm(made[row, heads:])
            assert (stored[1] == new[row]).all()
            expected[at] = pool[at]
        assert (pool == expected).all()
        assert not self.read("arrivals").any()


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("name", KERNELS)
def test_results(compiled, name, late):
    from tests.unit.triton.compiled_token import settings_of

    settings = settings_of(name)
    span = settings["num_warps"] * settings["TOKENS"]
    around = [
        0,
        1,
        2,
        16,
        17,
        18,
        span,
        span + 1,
        span + 2,
        span * settings["STAGES"] + 1,
        span * settings["STAGES"] + 5,
    ]
    lengths = [*around, 3 * span + 40] if settings["DIRECT"] else [*around, 4 * span + 7, 5 * span + 1]
    step = Step(settings, lengths, 1 if settings["DIRECT"] else 3, 7 + late)
    step.run(Program((compiled[0] / f"{name}.ptx").read_text()), late)
    step.check()


HOPPER = Target(kind="cuda", arch=90, multiprocessors=132, shared_bytes=SHARED, overlaps=True)


def spec_of(heads=32, kv_heads=8, size=128, block=16, kept="bfloat16", **rules):
    parts = tuple(CachePart(name=name, shape=(kv_heads, size), dtype=kept) for name in "kv")
    layout = CacheLayout(spec=CacheSpec(kind="full", parts=parts), block_tokens=block, bytes_per_block=0, alignment=64,
                         strided=True, slot_dtype="int32")  # fmt: skip
    return AttentionSpec(dtype="bfloat16", num_heads=heads, num_kv_heads=kv_heads, head_dim=size, v_head_dim=size,
                         scale=0.1, layout=layout, **rules)  # fmt: skip


def test_choice():
    """Only what the kernel is made for, and where a program fits."""
    for programs in (8, 132, 133, 512, 4096):
        stream = decode_stream(spec_of(), HOPPER, programs, 8192)
        assert stream.shared_bytes <= SHARED and stream.tokens % 16 == 0
    assert decode_stream(spec_of(), HOPPER, 4096, 8192).warps == 1
    for programs in (8, 64):  # few rows that may be very long are read in several stages
        assert decode_stream(spec_of(), HOPPER, programs, 100_000).stages > 2
    for odd in (dict(window=64), dict(sinks=True), dict(soft_cap=5.0), dict(causal=False), dict(size=64),
                dict(block=32), dict(kept="float8_e4m3fn"), dict(heads=64, kv_heads=4)):  # fmt: skip
        assert decode_stream(spec_of(**odd), HOPPER, 64, 8192) is None, odd
    assert decode_stream(spec_of(), replace(HOPPER, shared_bytes=100 << 10), 8, 8192) is None
    for arch in (80, 100):
        assert decode_stream(spec_of(), replace(HOPPER, arch=arch), 8, 8192) is None


LAUNCHES = r"""
import json, types
import torch
from drivetrain_api.v1 import AttentionBatch, RmsNormSpec, RopeSpec
from drivetrain_triton import attention, attention_token_stream
from drivetrain_triton.attention_rotate import RotateAndAttend
from tests.unit.triton.test_token_stream import HOPPER, spec_of

seen, real, old = [], attention_token_stream.token_stream_kernel, []
class Noted:
    def __init__(self, into): self.into = into
    def __getitem__(self, grid): return lambda *args, **named: self.into.append((grid, args, named))
attention_token_stream.token_stream_kernel = Noted(seen)
attention.token_kernel = Noted(old)
spec, rows = spec_of(), 3
def ints(*values): return torch.tensor(values, dtype=torch.int32)
import numpy as np
batch = AttentionBatch(
    query_start_dev=ints(0, 1, 2, 3), lengths_dev=ints(5, 6, 7), block_table_dev=torch.ones(3, 40, dtype=torch.int32),
    slots_dev=ints(20, 21, 22), token_row_dev=ints(0, 1, 2), positions_dev=ints(4, 5, 6),
    query_start_host=np.arange(4, dtype=np.int32), length_bounds_host=np.full(3, 600, np.int32),
    host_lengths_exact=False, num_decode_rows=3, num_verify_rows=0, num_prefill_rows=0, max_query_len=1,
    max_length_bound=600)
planner = attention.TritonAttention(spec, HOPPER)
planner.decode_streamed = True
plan = planner.plan(batch)
pool = torch.zeros(9, 2, 16, 8, 128, dtype=torch.bfloat16)
class Cache: pass
cache = Cache()
cache.parts = pool[:, 0], pool[:, 1]
run = RotateAndAttend(RmsNormSpec(dtype="bfloat16", size=128, eps=1e-6),
                      RopeSpec(dtype="bfloat16", head_dim=128, rotary_dim=128), spec, HOPPER)
x, weight = torch.zeros(rows, 48, 128, dtype=torch.bfloat16), torch.zeros(40, 128, dtype=torch.bfloat16)
cos, sin = torch.zeros(rows, 64), torch.ones(rows, 64)
out = run(x, weight, cos, sin, cache, plan)
(grid, args, named), = seen
params = [p for p in real.params]
assert [p.name for p in params if not p.is_constexpr] == [p.name for p in params[:len(args)]]
assert {p.name for p in params if p.is_constexpr} == set(named) - {"launch_pdl"}, named
given = dict(zip((p.name for p in params), args))
part = plan.decode
assert grid == (8, 3, part.splits) and part.splits > 1 and not named["DIRECT"]
same = {"out": out, "partial": part.partial, "lse": part.lse, "arrivals": part.arrivals, "x": x, "weight": weight,
        "cos": cos, "sin": sin, "key_cache": cache.parts[0], "value_cache": cache.parts[1], "slots": batch.slots_dev}
for name, tensor in same.items():
    assert given[name] is tensor, name
assert given["lengths"].data_ptr() == batch.lengths_dev.data_ptr()
assert given["tables"].data_ptr() == batch.block_table_dev.data_ptr()
assert (given["table_stride"], given["table_width"], given["x_stride"]) == (40, 40, 48 * 128)
assert (given["scale"], given["eps"]) == (0.1, 1e-6)
assert [given[name].base is part for name, part in zip(("keys", "values"), cache.parts)] == [True, True]
assert named["KEY_RATIO"] == named["VALUE_RATIO"] == 32
wide = Cache()  # rows of tokens farther apart: nothing that boxes can describe
wide.parts = tuple(torch.zeros(9, 16, 8, 256, dtype=torch.bfloat16)[..., :128] for _ in "kv")
run(x, weight, cos, sin, wide, plan)
assert len(seen) == 1 and len(old) == 1
planner.decode_tiles = attention.Tiles(16, 32, 2, 3, ahead=True)  # to measure: as they are, without streams
assert planner.plan(batch).decode.tiles == planner.decode_tiles
print("done")
"""


def test_launch(tmp_path):
    """What the kernel is given, and that a cache that can't be copied by boxes takes the other kernel."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", LAUNCHES], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.stdout == "done\n", done.stderr[-3000:]

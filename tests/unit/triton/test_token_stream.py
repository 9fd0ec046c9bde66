"""Decode attention by bulk copies: what the compiler makes of it, and its PTX run on the host against float64."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

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

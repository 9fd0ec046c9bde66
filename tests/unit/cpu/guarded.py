"""Runs the kernels on buffers that end, or begin, at a page that must not be touched: an access beyond is a crash.

Prefetching beyond is allowed; it never faults.
"""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path

import numpy as np

from drivetrain_cpu.native import AttentionJob, PrepareGroup, PrepareJob, load_kernels

PAGE = mmap.PAGESIZE
LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
PROT_NONE = 0
RANDOM = np.random.default_rng(5)


def fenced(values, at_end):
    """A copy of an array whose last byte, or first, lies at a forbidden page."""
    values = np.ascontiguousarray(values)
    body = -(-max(1, values.nbytes) // PAGE) * PAGE
    memory = mmap.mmap(-1, body + 2 * PAGE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for at in (start, start + PAGE + body):
        assert LIBC.mprotect(at, PAGE, PROT_NONE) == 0
    offset = PAGE + (body - values.nbytes if at_end else 0)
    array = np.frombuffer(memory, values.dtype, values.size, offset).reshape(values.shape)
    array[...] = values
    return array


def normal(*shape):
    return RANDOM.standard_normal(shape, dtype=np.float32)


def halves(*shape):
    """Random bfloat16 values as they lie in memory."""
    return (normal(*shape).view(np.uint32) >> 16).astype(np.uint16)


def widened(values):
    return values if values.dtype == np.float32 else (values.astype(np.uint32) << 16).view(np.float32)


def close(got, want):
    np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-3)


class Guarded:
    """The C functions of one library at one level."""

    def __init__(self, path, level):
        self.library, self.level, self.count = load_kernels(Path(path)).library, level, 0

    def begin(self, *case):
        """Say what comes, so that a crash names its case."""
        self.count += 1
        print(*case, flush=True)

    def linear(self, rows, outs, size, threads, at_end, beyond=0):
        self.begin("linear", rows, outs, size, threads, at_end)
        x, weight, out = (fenced(v, at_end) for v in (normal(rows, size), halves(outs, size), normal(rows, outs)))
        places = (x.ctypes.data, weight.ctypes.data, out.ctypes.data)
        assert self.library.drivetrain_linear(*places, rows, outs, size + beyond, self.level, threads) == 0
        close(out, x @ widened(weight).T)

    def norm(self, runs, inner, size, gap, weights, residual, at_end):
        self.begin("norm", runs, inner, size, gap, weights, residual, at_end)
        rows, stride = runs * inner, inner * size + gap
        flat = fenced(normal(runs * stride - gap), at_end)
        x = np.lib.stride_tricks.as_strided(flat, (runs, inner, size), (4 * stride, 4 * size, 4)).reshape(rows, size)
        more = fenced(normal(rows, size), at_end)
        weight = fenced(normal(weights, size), at_end)
        total, out = (fenced(normal(rows, size), at_end) for _ in range(2))
        places = (flat, more if residual else None, weight, total if residual else flat, out)
        addresses = [None if place is None else place.ctypes.data for place in places]
        self.library.drivetrain_norm(*addresses, rows, inner, size, stride, weights, 1e-6, self.level, 2)
        wide = x + more if residual else x
        scale = 1 / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-6)
        close(out, wide * scale * weight[np.arange(rows) % weights])

    def attend(self, kv_heads, groups, dim, v_dim, half, at_end):
        """Two rows over blocks of three slots; the first and the last slot of the cache are read."""
        self.begin("attend", kv_heads, groups, dim, v_dim, half, at_end)
        heads, slots, make = kv_heads * groups, 3, halves if half else normal
        arrays = {
            "q": normal(2, heads, dim),
            "k": make(6, slots, kv_heads, dim),
            "v": make(6, slots, kv_heads, v_dim),
            "out": normal(2, heads, v_dim),
            "sinks": normal(heads),
            "table": np.array([[3, 1, 5], [0, 4, 2]], np.int64),
            "tokens": np.array([1, 0], np.int64),
            "rows": np.array([0, 1], np.int64),
            "lows": np.array([2, 0], np.int64),
            "ends": np.array([9, 7], np.int64),
        }
        arrays = {name: fenced(value, at_end) for name, value in arrays.items()}
        job = AttentionJob(
            **{name: value.ctypes.data for name, value in arrays.items()},
            **{"entries": 2, "heads": heads, "kv_heads": kv_heads, "dim": dim, "v_dim": v_dim, "width": 3},
            **{"block_tokens": slots, "q_stride": heads * dim, "scale": 0.5, "soft_cap": 0.0, "half": half},
            **{"k_block": slots * kv_heads * dim, "k_slot": kv_heads * dim, "k_head": dim},
            **{"v_block": slots * kv_heads * v_dim, "v_slot": kv_heads * v_dim, "v_head": v_dim},
        )
        self.library.drivetrain_attend(ctypes.byref(job), self.level, 2)
        close(arrays["out"], attended(arrays, groups))

    def prepare(self, wide, at_end):
        """A decode row, a prompt's chunk and a padded row over two groups; the last row of the tables is used."""
        self.begin("prepare", wide, at_end)
        slot = np.int64 if wide else np.int32
        narrow = {
            "rows": [2, 0, 3],
            "start": [-1, 4, -1],
            "num_new": [1, 2, 0],
            "token_row": [0, 1, 1, 2],
            "token_offset": [0, 0, 1, 0],
            "host_ids": [7, 8, 9, 7],
            "last_tokens": [[5], [6], [70], [0]],
            "computed": [1, 2, 5, 0],
        }
        arrays = {name: fenced(np.array(value, np.int32), at_end) for name, value in narrow.items()}
        made = {"ids": 4, "positions": 4, "base": 3, "lengths": 3}
        arrays |= {name: fenced(np.zeros(size, slot), at_end) for name, size in made.items()}
        tables = [fenced(np.arange(4 * width, dtype=slot).reshape(4, width), at_end) for width in (3, 2)]
        blocks = [fenced(np.zeros((3, width), slot), at_end) for width in (3, 2)]
        slots = [fenced(np.zeros(4, slot), at_end) for _ in range(2)]
        groups = (PrepareGroup * 2)()
        for group, table, block, own, size in zip(groups, tables, blocks, slots, (2, 4), strict=True):
            group.table, group.blocks, group.slots = (a.ctypes.data for a in (table, block, own))
            group.stride = group.width = table.shape[1]
            group.block_tokens = size
        counts = {"num_rows": 3, "num_tokens": 4, "num_groups": 2, "table_rows": 4, "places": 1, "wide": int(wide)}
        job = PrepareJob(groups=groups, **{name: a.ctypes.data for name, a in arrays.items()}, **counts)
        assert self.library.drivetrain_prepare(ctypes.byref(job)) == 0
        assert arrays["ids"].tolist() == [70, 8, 9, 0] and arrays["positions"].tolist() == [5, 4, 5, 0]
        assert arrays["base"].tolist() == [5, 4, 0] and arrays["computed"].tolist() == [6, 2, 6, 0]
        assert [s.tolist() for s in slots] == [[17, 4, 5, 0], [21, 4, 5, 0]]
        assert all(b.tolist() == t[[2, 0, 3]].tolist() for b, t in zip(blocks, tables, strict=True))
        arrays["rows"][2] = 4
        assert self.library.drivetrain_prepare(ctypes.byref(job)) == 1

    def keep(self, at_end):
        """Two rows of a table of three, the last one among them."""
        self.begin("keep", at_end)
        tokens, witness, rows = (np.array(v, np.int32) for v in ([8, 9], [-1, 2], [2, 0]))
        arrays = [fenced(a, at_end) for a in (tokens, witness, rows, np.ones((3, 2), np.int32), np.zeros(4, np.int32))]
        places = [ctypes.c_void_p(a.ctypes.data) for a in arrays]
        counts = [ctypes.c_int64(n) for n in (2, 3, 2)]
        assert self.library.drivetrain_keep(*places, *counts) == 0
        assert arrays[3].tolist() == [[9, 1], [1, 1], [8, 1]] and arrays[4].tolist() == [8, 9, -1, 2]
        arrays[2][1] = -1
        assert self.library.drivetrain_keep(*places, *counts) == 1


def attended(a, groups):
    """The same in numpy."""
    out = np.zeros_like(a["out"])
    for token, row, low, end in zip(a["tokens"], a["rows"], a["lows"], a["ends"], strict=True):
        keys, values = (widened(a[part][a["table"][row]]).reshape(9, *a[part].shape[2:])[low:end] for part in "kv")
        for head in range(out.shape[1]):
            scores = np.exp(keys[:, head // groups] @ a["q"][token, head] * 0.5)
            out[token, head] = scores @ values[:, head // groups] / (scores.sum() + np.exp(a["sinks"][head]))
    return out


def main(path, level, beyond=""):
    """All cases. ``beyond``: the kernel is told of one input more than there is, which must be a crash."""
    guarded = Guarded(path, int(level))
    if beyond:
        guarded.linear(1, 1, 64, 1, True, beyond=1)
        return
    for at_end in (True, False):
        guarded.keep(at_end)
        for wide in (True, False):
            guarded.prepare(wide, at_end)
        for size in (1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 47, 63, 64, 65, 127, 641):
            for rows, outs in ((1, 1), (1, 5), (2, 9), (3, 41), (6, 3), (7, 1), (8, 7), (17, 131)):
                guarded.linear(rows, outs, size, 1 + outs % 2, at_end)
            for residual in (False, True):
                guarded.norm(1, 1, size, 0, 1, residual, at_end)
                guarded.norm(33, 1, size, 0, 1, residual, at_end)
                guarded.norm(5, 3, size, 2 * size, 3, residual, at_end)
            for half in (False, True):
                for kv_heads, groups, v_dim in ((1, 1, size), (2, 3, 5), (1, 5, size + 1), (3, 8, 1)):
                    guarded.attend(kv_heads, groups, size, v_dim, half, at_end)
    print(guarded.count, "cases")

"""Which tiles, how many shares and which cases: the attention kernels' host decisions, without tensors."""

from __future__ import annotations

from dataclasses import dataclass, replace

from drivetrain_api.v1 import AttentionSpec, dtype_bytes

from .target import Target

DTYPES = ("float32", "bfloat16", "float16")
MAX_SPLITS = 64
MAX_HEAD_DIM = 256
FEW = 4  # decode programs (of one share) are few while there are so many multiprocessors for each
WAVES = 8  # beyond so many decode programs a multiprocessor, small ones
FP8, FP8_ARCH = "float8_e4m3fn", 89
STREAM_ARCH, STREAM_WIDTH, STREAM_BLOCK, STREAM_GROUP = 90, 128, 16, 8  # what ``attention_token_stream`` is made for
LONG_CONTEXT = 16384  # keys of a row


@dataclass(frozen=True, slots=True)
class Stream:
    """A decode program to which bulk copies bring keys and values: ``tokens`` a warp in each of ``stages``; a share of
    a row has ``least`` stages or more."""

    tokens: int
    warps: int
    stages: int
    least: int = 1

    @property
    def shared_bytes(self) -> int:
        """What a program takes: the ring, the queries, and what says that copies have come."""
        return 2 * self.stages * self.warps * self.tokens * STREAM_WIDTH * 2 + 16 * STREAM_WIDTH * 2 + 16 * self.stages


@dataclass(frozen=True, slots=True)
class Tiles:
    """BLOCK_M rows of queries (prefill), BLOCK_N keys, warps a program and stages of its pipeline.

    ``ahead``: a decode program that makes its own queries asks for its first tile of keys and values before that, and
    goes on so, in registers and without stages.
    ``stream``: where bulk copies can bring the cache, they do, to such programs.
    """

    block_m: int
    block_n: int
    warps: int
    stages: int
    ahead: bool = False
    stream: Stream | None = None


def power_of_two(n: int) -> int:
    """Return the smallest power of two that is at least n."""
    return 1 << max(0, n - 1).bit_length()


def padded(size: int) -> int:
    """Return a head size as a side of a matrix product."""
    return max(16, power_of_two(size))


def decode_tiles(spec: AttentionSpec, target: Target, programs: int, alone: bool) -> Tiles:
    """Tiles of decode kernels by how many ``programs`` there are, one a row and KV head; ``alone``: no prompts beside.

    Several programs share a multiprocessor, so that one loads while another computes: the bytes in flight of all of
    them must cover the memory's latency (about 32 KB a multiprocessor). Alone, one kernel does all from the product on,
    and what is slow is the way to its first keys: its programs go ahead. Few of them take four warps; where there are
    enough to share a multiprocessor, two; where they come in several waves, one and short tiles, which leave less of
    the last wave empty. Measured by ``ci/perf/device_attention.py`` with heads of 128.
    """
    width = (padded(spec.head_dim) + padded(spec.v_head_dim)) * dtype_bytes(spec.dtype)
    block_m = max(16, power_of_two(spec.num_heads // spec.num_kv_heads))
    if width > 512:
        return fitted(Tiles(block_m, 32, 4, 2), spec, target)
    waves = programs > WAVES * target.multiprocessors
    if not alone:
        return fitted(Tiles(block_m, 32, 2, 3) if waves else Tiles(block_m, 64, 4, 2), spec, target)
    if waves:
        return fitted(Tiles(block_m, 16, 1, 3, ahead=True), spec, target)
    warps = 4 if programs * FEW <= target.multiprocessors else 2
    return fitted(Tiles(block_m, 32, warps, 3, ahead=True), spec, target)


def streamable(spec: AttentionSpec, target: Target) -> bool:
    """Whether kernels of bulk copies serve a spec: plain causal attention with heads of 128."""
    plain = spec.causal and spec.window is None and spec.soft_cap is None and spec.dtype in ("bfloat16", "float16")
    same = all(part.dtype == spec.dtype for part in spec.layout.spec.parts)
    return target.arch == STREAM_ARCH and plain and spec.head_dim == spec.v_head_dim == STREAM_WIDTH and same


def decode_stream(spec: AttentionSpec, target: Target, programs: int, longest: int) -> Stream | None:
    """How bulk copies serve decode rows without prompts beside, by how many ``programs`` there are, one a row and KV
    head. Many: one warp a program, several programs a multiprocessor, so that nothing waits for other warps. Few: a
    row's keys spread over a program's warps, and over programs only beyond what one can have in flight. ``longest``:
    the most keys of a row; where they may be very many, reading them outlasts all else and takes several stages."""
    blocks, group = spec.layout.block_tokens, spec.num_heads // spec.num_kv_heads
    if not streamable(spec, target) or blocks != STREAM_BLOCK or group > STREAM_GROUP or spec.sinks:
        return None
    # Measured on an H200, 132 multiprocessors: 8 programs (a row of 8 KV heads), 64, 512, 2048.
    many = programs / target.multiprocessors
    if many > 1.5:
        stream = Stream(32, 1, 3) if many <= 8 else Stream(32, 1, 2)
    elif longest > LONG_CONTEXT:
        stream = Stream(16, 4, 3, 2)
    else:
        stream = Stream(32, 8, 1) if many <= 0.25 else Stream(32, 4, 2, 2)
    return stream if stream.shared_bytes <= target.shared_bytes else None


def prefill_tiles(spec: AttentionSpec, target: Target, max_query_len: int) -> Tiles:
    """Tiles of the prefill kernel by the longest row: 16 or 64 rows where no row would fill 128."""
    rows = max_query_len * (spec.num_heads // spec.num_kv_heads)
    wide = max(padded(spec.head_dim), padded(spec.v_head_dim)) > 128
    if spec.dtype == "float32":  # no matrix units at full precision: what keeps registers from spilling
        return fitted(Tiles(16 if rows <= 16 else 32, 32, 4, 2), spec, target)
    if rows <= 16:
        return fitted(Tiles(16, 64, 4, 2 if wide else 3), spec, target)
    if rows <= 64 or (wide and target.arch < 90):  # without wgmma, operands take registers
        block_n = 64 if target.arch >= 90 and not wide else 32
        return fitted(Tiles(64, block_n, 8 if wide and target.arch < 90 else 4, 3), spec, target)
    # wgmma reads operands from shared memory, so a fourth stage costs no registers: a fifth faster on an H200.
    return fitted(Tiles(128, 32 if wide else 64, 8, 4 if target.arch == 90 and not wide else 3), spec, target)


def fitted(tiles: Tiles, spec: AttentionSpec, target: Target) -> Tiles:
    """Take stages, then keys, off until queries, keys and values fit in shared memory."""
    group = spec.num_heads // spec.num_kv_heads
    block_m = max(tiles.block_m, power_of_two(group))
    block_n, stages = tiles.block_n, tiles.stages

    def needed() -> int:
        width = padded(spec.head_dim) + padded(spec.v_head_dim)
        elements = block_m * padded(spec.head_dim) + stages * block_n * width + block_m * block_n
        return elements * dtype_bytes(spec.dtype)

    while needed() > target.shared_bytes and stages > 1:
        stages -= 1
    while needed() > target.shared_bytes and block_n > 16:
        block_n //= 2
    return replace(tiles, block_m=block_m, block_n=block_n, stages=stages)


def splits_of(programs: int, wanted: int, most_tiles: int) -> int:
    """Cut each of ``programs`` into a power of two of shares, so that about ``wanted`` run; a share is a tile or more.

    Host values only, and those that a captured graph keeps: the shares themselves are measured on the device.
    """
    splits = 1
    while splits < MAX_SPLITS and splits < most_tiles and 2 * splits * programs <= wanted:
        splits *= 2
    return splits


def shares_at_once(spec: AttentionSpec) -> int:
    """Return how many shares of a row one program loads together: 64 float32 registers a thread of four warps."""
    group = power_of_two(spec.num_heads // spec.num_kv_heads)
    return max(1, min(MAX_SPLITS, 8192 // (group * padded(spec.v_head_dim))))


def refusal(spec: AttentionSpec, target: Target) -> str | None:
    """Say why a spec is not served, or None."""
    special = [name for name in ("selected_keys", "latent", "cross") if getattr(spec, name)]
    if special:
        return f"no kernel for {', '.join(special)} yet"
    if not spec.layout.strided:
        return "the kernel reads strided caches, and this layout is opaque"
    if spec.dtype not in DTYPES:
        return f"no kernel for {spec.dtype}"
    if max(spec.head_dim, spec.v_head_dim) > MAX_HEAD_DIM:
        return f"heads wider than {MAX_HEAD_DIM} have no kernel yet"
    if spec.num_heads % spec.num_kv_heads:
        return f"{spec.num_heads} query heads do not share {spec.num_kv_heads} key heads evenly"
    if not spec.scale > 0 or (spec.soft_cap is not None and not spec.soft_cap > 0):
        return "the kernel needs a positive scale and soft cap"
    return cache_refusal(spec, target)


def cache_refusal(spec: AttentionSpec, target: Target) -> str | None:
    """Say why a cache's dtypes or shapes are not served, or None."""
    parts = spec.layout.spec.parts
    shapes = [part.shape for part in parts]
    if shapes != [(spec.num_kv_heads, spec.head_dim), (spec.num_kv_heads, spec.v_head_dim)]:
        return f"the kernel reads keys and values a head, and the cache keeps {shapes}"
    if spec.layout.block_tokens != power_of_two(spec.layout.block_tokens):
        return f"blocks of {spec.layout.block_tokens} tokens are no power of two"
    for part in parts:
        if part.dtype == spec.dtype:
            continue
        if part.dtype != FP8 or spec.dtype == "float32":
            return f"no kernel reads a cache of {part.dtype} beside {spec.dtype}"
        if target.kind != "interpreter" and target.arch < FP8_ARCH:
            return f"{FP8} needs arch {FP8_ARCH}, and this is {target.arch}"
    return None

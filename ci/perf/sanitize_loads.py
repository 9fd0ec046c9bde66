"""Small calls that between them run every kernel of ``plugins/triton``: what the sanitizer watches.

Inputs are random. ``Poisoned``: what a kernel should have written and did not shows; results of our own calls are
looked at for that. The cases of the ops' references serve for all ops that have them. Each load names its kernels.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from sanitize_engine import DTYPE, SEED, engine
from torch.overrides import TorchFunctionMode

import drivetrain_triton
from drivetrain.ops.cases.attention import Shape, attention_case, fill_cache, make_batch, make_rows, make_spec
from drivetrain.ops.cases.source import Source
from drivetrain.ops.reference import REFERENCE, Place
from drivetrain_api.v1 import (
    AddRmsNormSpec,
    AttentionSpec,
    CachePart,
    Decline,
    DrawSpec,
    GatedActivationSpec,
    LinearSpec,
    RmsNormSpec,
    RopeSpec,
    torch_dtype,
)
from drivetrain_cuda.ops import Providers
from drivetrain_triton import launch
from drivetrain_triton.target import Target

FP8 = "float8_e4m3fn"
OF_128 = Shape(heads=4, kv_heads=2, head_dim=128, v_head_dim=128)
OF_20 = Shape(heads=6, kv_heads=2, head_dim=20, v_head_dim=20)
WIDE = Shape(heads=2, kv_heads=1, head_dim=256, v_head_dim=256)
LONG = 16384 + 264  # elements of a row that no program holds whole


class Poisoned(TorchFunctionMode):
    """New tensors begin as not-a-numbers, or the largest number."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func not in launch.UNFILLED or made.dtype == torch.bool:
            return made
        return made.fill_(float("nan") if made.is_floating_point() else torch.iinfo(made.dtype).max)


@dataclass(frozen=True, slots=True)
class Site:
    """Where loads run: the device's tensors and caches, and what the kernels know of it."""

    place: Place
    target: Target

    @property
    def device(self) -> torch.device:
        """The device of all tensors."""
        return self.place.runtime.device

    def providers(self, *, deterministic: bool = False) -> Providers:
        """The backend's."""
        return Providers(target=self.target, deterministic=deterministic)

    def implementation(self, spec: Any, *, deterministic: bool = False) -> Any:
        """What runs a spec; None where the backend has no kernel."""
        answer = self.providers(deterministic=deterministic).provide(spec)
        return None if isinstance(answer, Decline) else answer.implementation

    def random(self, *shape: int, scale: float = 1.0, dtype: str = DTYPE) -> torch.Tensor:
        """Normal values."""
        return (torch.randn(*shape) * scale).to(torch_dtype(dtype)).to(self.device)


@dataclass(frozen=True, slots=True)
class Load:
    """``run``: makes the calls. ``kernels``: what it is there for; more may run. ``ahead``: what it needs can be
    compiled before it runs."""

    name: str
    run: Callable[[Site], None]
    kernels: tuple[str, ...]
    ahead: bool = True


def written(*results: torch.Tensor) -> None:
    """RuntimeError where a result is no number, as what nobody wrote is."""
    for result in results:
        if result.is_floating_point() and bool(result.isnan().any()):
            raise RuntimeError(f"a result of {tuple(result.shape)} was not written whole")


def cases(site: Site, *ops: str, deterministic: bool = False, dtype: str = DTYPE) -> None:
    """The reference's cases of some ops, by what the backend runs them with."""
    for op in ops:
        for case in REFERENCE[f"{op}/1"].cases(site.place, dtype, SEED):
            implementation = site.implementation(case.spec, deterministic=deterministic)
            if implementation is not None:
                case.run(implementation)


def kept_in(spec: AttentionSpec, site: Site, kept: str) -> AttentionSpec:
    """The spec with a cache of another dtype."""
    parts = tuple(CachePart(name=part.name, shape=part.shape, dtype=kept) for part in spec.layout.spec.parts)
    layout = site.place.storage.layout(replace(spec.layout.spec, parts=parts), spec.layout.block_tokens)
    return replace(spec, layout=layout)


def pointwise(site: Site) -> None:
    """Norms, activations, rotations, embedding."""
    cases(site, "norm.rms", "norm.add_rms", "norm.layer", "norm.add_layer", "activation.gated", "activation.plain")
    cases(site, "rope.angles", "rope.apply", "embedding")
    for size in (1024, LONG):
        weight, x, residual = site.random(size), site.random(3, size), site.random(3, size, dtype="float32")
        alone, add = (
            site.implementation(kind(dtype=DTYPE, size=size, eps=1e-6)) for kind in (RmsNormSpec, AddRmsNormSpec)
        )
        written(alone(x, weight), *add(x, residual, weight))


def sampling(site: Site) -> None:
    """A step's preparation, every kind of draw, what is kept and counted, penalties, logprobs."""
    cases(site, "input.prepare", "sample.draw", "sample.keep", "sample.adjust", "sample.count")
    cases(site, "sample.draw", dtype="float32")
    cases(site, "sample.logprobs", deterministic=True)


def attended(site: Site, shape: Shape, rows: tuple[tuple[int, int], ...], *, deterministic: bool = False,
             kept: str = DTYPE, loose: int = 0) -> None:  # fmt: skip
    """Write the cache and attend: rows of (length, queries)."""
    source, spec = Source(DTYPE, SEED), make_spec(site.place, shape, DTYPE)
    spec = spec if kept == DTYPE else kept_in(spec, site, kept)
    made = make_rows(rows, spec.layout.block_tokens, loose, source.random)
    implementation = site.implementation(spec, deterministic=deterministic)
    if kept == DTYPE:
        written(*attention_case(site.place, "", spec, made, source).run(implementation))
        return
    cache, batch = filled(site, spec, made.num_blocks), make_batch(site.place, made, spec.layout.slot_dtype)
    new = [site.random(batch.num_tokens, shape.kv_heads, shape.head_dim) for _ in range(2)]
    plan = implementation.plan(batch)
    implementation.write(cache, *new, plan)
    written(implementation.forward(site.random(batch.num_tokens, shape.heads, shape.head_dim), cache, plan))


def filled(site: Site, spec: AttentionSpec, blocks: int) -> Any:
    """A cache of random values."""
    cache = site.place.storage.allocate(spec.layout, blocks)
    for part in cache.parts:
        part.copy_(torch.randn(part.shape).to(part.dtype).to(part.device))
    return cache


def turned(site: Site, shape: Shape, rows: tuple[tuple[int, int], ...], *, normed: bool = True, kept: str = DTYPE,
           deterministic: bool = False) -> None:  # fmt: skip
    """All from the q/k/v product to attention's result; pairs lie side by side where there is no norm."""
    source, spec = Source(DTYPE, SEED), make_spec(site.place, shape, DTYPE)
    spec = spec if kept == DTYPE else kept_in(spec, site, kept)
    made = make_rows(rows, spec.layout.block_tokens, 0, source.random)
    if kept == DTYPE:  # not a number where no row has a token
        past = [[source.normal(n, shape.kv_heads, shape.head_dim) for n, _ in rows] for _ in range(2)]
        cache = fill_cache(site.place, spec, made, *past)
    else:
        cache = filled(site, spec, made.num_blocks)
    batch = make_batch(site.place, made, spec.layout.slot_dtype)
    size, tokens = shape.head_dim, batch.num_tokens
    rope = RopeSpec(
        dtype=DTYPE, head_dim=size, rotary_dim=size, style="halves" if normed or size == 128 else "interleaved"
    )
    norm = [RmsNormSpec(dtype=DTYPE, size=size, eps=1e-6)] if normed else []
    fused = site.providers(deterministic=deterministic).fuse((*norm, rope, spec))
    assert fused is not None
    angle = site.random(tokens, size // 2, dtype="float32")
    weight = site.random(shape.heads + shape.kv_heads, size) if normed else None
    plan = site.implementation(spec, deterministic=deterministic).plan(batch)
    sinks = site.random(shape.heads) if shape.sinks else None
    x = site.random(tokens, shape.heads + 2 * shape.kv_heads, size)
    written(fused.provided.implementation(x, weight, angle.cos(), angle.sin(), cache, plan, sinks))


def attention(site: Site) -> None:
    """Kernels that read the cache through registers: the reference's cases, wide heads, caches of fp8."""
    cases(site, "attention.paged")
    attended(site, OF_128, ((900, 1), (33, 1), (400, 40), (70, 70)))
    attended(site, WIDE, ((300, 1), (90, 20)))
    attended(site, OF_20, ((300, 1), (90, 20), (64, 64)), kept=FP8)
    attended(site, OF_128, ((700, 1), (130, 130)), kept=FP8)


def decoding(site: Site) -> None:
    """Norm, rotation, write and attention of decode rows as one kernel; rows with more tokens beside them."""
    sinks = replace(OF_20, sinks=True, window=40)
    turned(site, OF_20, ((77, 1), (300, 1), (1, 1)), normed=False)
    turned(site, OF_20, ((1200, 1),))
    turned(site, sinks, ((77, 1), (300, 1)))
    turned(site, OF_20, ((77, 1), (300, 1)), kept=FP8)
    turned(site, OF_128, ((77, 1), (700, 1)), kept=FP8)
    turned(site, OF_20, ((40, 1), (50, 30), (3, 3)))
    turned(site, OF_128, ((40, 1), (50, 30)), normed=False)


def decode_streams(site: Site) -> None:
    """Decode rows whose keys come by bulk copies, by how many there are and how long they may be."""
    for count in (1, 40, 100, 700):
        lengths = [(1, 16, 17, 77, 128, 129, 209)[number % 7] for number in range(count)]
        turned(site, OF_128, tuple((length, 1) for length in lengths), normed=count != 40)
    turned(site, OF_128, ((3000, 1), (5, 1)))
    turned(site, OF_128, ((16600, 1), (500, 1)))


def prompts(site: Site) -> None:
    """Long prompts whose keys come by bulk copies: whole tiles, tails, beside decode rows, behind earlier tokens."""
    for rows in (((300, 300),), ((256, 256),), ((40, 1), (440, 300), (130, 130)), ((440, 200), (77, 77))):
        attended(site, OF_128, rows)
    attended(site, replace(OF_128, heads=14), ((150, 150),))


def multiplied(site: Site, sizes: tuple[int, int, int], *, bias: bool = False, deterministic: bool = False,
               dtype: str = DTYPE) -> None:  # fmt: skip
    """A product of (rows, outputs, inputs) by what the backend takes for it."""
    rows, outs, ins = sizes
    linear = site.implementation(
        LinearSpec(dtype=dtype, in_features=ins, out_features=outs, bias=bias), deterministic=deterministic
    )
    terms = site.random(outs, dtype=dtype) if bias else None
    packed = linear.pack(site.random(outs, ins, scale=ins**-0.5, dtype=dtype), terms)
    written(linear.apply(site.random(rows, ins, dtype=dtype), packed))


def gated(site: Site, rows: int, outs: int, ins: int, kind: str = "silu", *, normed: bool = False) -> None:
    """A product of ``outs`` gate and as many up rows with its activation, and with the norm before it."""
    specs: tuple[Any, ...] = (
        LinearSpec(dtype=DTYPE, in_features=ins, out_features=2 * outs, bias=False),
        GatedActivationSpec(dtype=DTYPE, size=outs, kind=kind),  # type: ignore[arg-type]
    )
    specs = (AddRmsNormSpec(dtype=DTYPE, size=ins, eps=1e-6), *specs) if normed else specs
    fused = site.providers().fuse(specs)
    assert fused is not None
    made, weight, x = fused.provided.implementation, site.random(2 * outs, ins, scale=ins**-0.5), site.random(rows, ins)
    packed = made.pack(weight, None)
    if normed:
        for residual in (None, site.random(rows, ins, dtype="float32")):
            written(*made.apply(x, residual, site.random(ins), packed))
    else:
        written(made.apply(x, packed))


def products(site: Site) -> None:
    """Products of few rows, with bias and gate, with the norm before them; all numbers of rows from the cases."""
    cases(site, "linear")
    for rows in (1, 2, 9, 64):
        multiplied(site, (rows, 640, 1024))
        multiplied(site, (rows, 200, 264), bias=True)
        gated(site, rows, 192, 520)
    for sizes in ((20, 4096, 1024), (64, 1024, 2048), (50, 1024, 3072)):  # small weights, whose programs meet
        multiplied(site, sizes)
    gated(site, 64, 3072, 1024)
    multiplied(site, (3, 96, 1028))  # rows that bulk copies can't bring
    multiplied(site, (20, 96, 1028), bias=True)
    multiplied(site, (2, 96, 200), dtype="float32")
    for rows in (1, 2):
        gated(site, rows, 192, 520, "gelu", normed=True)


def best(site: Site, rows: int, vocabulary: int, ins: int) -> None:
    """Greedy tokens without logits."""
    head = LinearSpec(dtype=DTYPE, in_features=ins, out_features=vocabulary, role="lm_head", tied=True)
    fused = site.providers().fuse((head, DrawSpec(dtype="float32", vocabulary=vocabulary)))
    assert fused is not None
    weight = site.random(vocabulary, ins, scale=ins**-0.5)
    packed = site.implementation(head).pack(weight, None)
    tokens, logits = fused.provided.implementation.best(site.random(rows, ins), packed)
    written(logits)
    if launch.COLLECTING.get() is None and not bool(((tokens >= 0) & (tokens < vocabulary)).all()):
        raise RuntimeError("a token outside the vocabulary")


def wide(site: Site) -> None:
    """Products of many rows by copying and multiplying warps; heads without logits."""
    for rows, outs, ins, kind in ((120, 16880, 72, "silu"), (250, 8448, 264, "gelu_tanh")):
        gated(site, rows, outs, ins, kind)
    for rows, vocabulary, ins in ((2, 1000, 264), (64, 1000, 1024), (65, 1000, 520), (300, 5000, 72)):
        best(site, rows, vocabulary, ins)


def invariant(site: Site) -> None:
    """What a deterministic engine runs."""
    cases(site, "linear", "attention.paged", deterministic=True)
    for sizes in ((1, 200, 1100), (70, 300, 1024), (130, 200, 264)):
        multiplied(site, sizes, bias=True, deterministic=True)
    multiplied(site, (3, 96, 1100), deterministic=True, dtype="float32")
    attended(site, OF_128, ((1300, 1), (33, 1), (700, 30)), deterministic=True)
    attended(site, OF_128, ((1300, 1), (70, 70)), deterministic=True, kept=FP8)
    turned(site, OF_20, ((77, 1), (600, 20)), deterministic=True)


def control(name: str, site: Site) -> None:
    """One of the control kernels."""
    from sanitize_controls import run_control

    run_control(name, site.device)


SAMPLING = (
    "_prepare",
    "_scan",
    "_choose",
    "_scale",
    "_limits",
    "_keep",
    "_log_softmax",
    "_named",
    "_penalties",
    "_count",
)
LOADS = (
    Load("orderly", partial(control, "orderly"), ("orderly",), ahead=False),
    Load("prompts", prompts, ("prompt_kernel", "write_kernel")),
    Load("wide", wide, ("wide_products", "wide_best", "stream_products", "_choose")),
    Load("streams", decode_streams, ("token_stream_kernel",)),
    Load("products", products, ("row_products", "fragment_products", "stream_products", "normed_row_products")),
    Load("decoding", decoding, ("token_kernel", "rotate_kernel")),
    Load("attention", attention, ("write_kernel", "decode_kernel", "merge_kernel", "prefill_kernel")),
    Load(
        "pointwise",
        pointwise,
        ("_norm", "_layer_norm", "_long_norm", "_gated", "_plain", "_lookup", "_angles", "_rotate"),
    ),
    Load("sampling", sampling, SAMPLING),
    Load("invariant", invariant, ("invariant_kernel", "join_kernel", "invariant_products", "add_shares")),
    Load("engine", engine, ("prompt_kernel", "token_stream_kernel", "row_products", "stream_products"), ahead=False),
    Load("racing", partial(control, "racing"), ("racing",), ahead=False),
)


def every_kernel() -> set[str]:
    """The names of all kernels of ``plugins/triton``."""
    return {name for name, _ in found_kernels()}


def found_kernels() -> Iterator[tuple[str, Any]]:
    """All kernels of ``plugins/triton``, each where it is made."""
    for module in pkgutil.iter_modules(drivetrain_triton.__path__, "drivetrain_triton."):
        for value in vars(importlib.import_module(module.name)).values():
            if isinstance(value, launch.Kernel) and value.__module__ == module.name:
                yield value.__name__, value


def site_of(device: str) -> Site:
    """The first card."""
    from drivetrain_api.v1 import torch_runtime, torch_storage
    from drivetrain_cuda.backend import BLOCK_TOKENS, SLOTS, target_of

    runtime = torch_runtime(device, 0)
    storage = torch_storage(runtime, BLOCK_TOKENS, SLOTS)
    return Site(Place(runtime=runtime, storage=storage), target_of(runtime.device, overlap=True))

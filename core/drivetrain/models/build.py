"""Making a decoder: build its structure, say what it will weigh, load a checkpoint into it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from drivetrain.errors import ModelError
from drivetrain.models.decoder import Decoder
from drivetrain.models.families import naming_of
from drivetrain.models.naming import CheckpointMap, Naming, map_checkpoint
from drivetrain.models.parameters import Holder
from drivetrain.models.spec import ModelSpec
from drivetrain.models.weights.checkpoint import Checkpoint
from drivetrain.models.weights.feed import Feed
from drivetrain.ops import Ops
from drivetrain_api.v1 import DeviceRuntime, torch_dtype

# Called after each holder with (holders loaded, holders in all).
Progress = Callable[[int, int], None]
# Returns the parameters at some paths, joined along dimension 0, on the device.
Read = Callable[[Sequence[str]], torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """``weight_bytes``: device bytes held by parameters after loading. ``peak_bytes``: the most held at any moment of
    loading, sources and packing temporaries included. ``seconds``: reading, moving and packing."""

    weight_bytes: int
    peak_bytes: int
    seconds: float


def build(spec: ModelSpec, ops: Ops, *, layers: range | None = None) -> Decoder:
    """Bind every op and lay out caches; parameters stay empty. ``layers``: the layers of a pipeline stage.

    ModelError when the range is not a run of the model's layers; DeviceError as ``Ops.bind`` says; ValueError when
    the backend's storage can't keep the cache.
    """
    layers = range(len(spec.layers)) if layers is None else layers
    if layers.step != 1 or not 0 <= layers.start < layers.stop <= len(spec.layers):
        raise ModelError(f"{layers} is not a run of the model's {len(spec.layers)} layers")
    return Decoder(spec, ops, layers)


def planned_bytes(spec: ModelSpec, ops: Ops, *, layers: range | None = None) -> int:
    """Device bytes that the parameters will hold: exactly what ``load`` will report as ``weight_bytes``."""
    return sum(holder.planned_bytes() for holder in build(spec, ops, layers=layers).holders)


def load(
    decoder: Decoder,
    checkpoint: Checkpoint,
    runtime: DeviceRuntime,
    progress: Progress | None = None,
    *,
    naming: Naming | None = None,
) -> LoadReport:
    """Fill a decoder. Each tensor is read once, converted to the model's dtype on the host, moved, and packed; of files
    of plain values to an asynchronous device several at a time, while others are moved.

    Before anything is read, one WeightsError names every missing, misshapen and extra tensor. ``naming``: how the
    checkpoint names parameters, by default the family's. Values are checked only in so far as a checkpoint that also
    holds the head of a tied model must hold the embedding there.
    """
    started = time.perf_counter()
    naming = naming_of(decoder.spec) if naming is None else naming
    mapped = map_checkpoint(decoder.spec, naming, checkpoint)
    holders = decoder.holders
    resident, peak = 0, 0
    with torch.no_grad(), runtime.activate(), _reader(holders, mapped, runtime) as read:
        for done, holder in enumerate(holders, 1):
            resident, highest = _fill(holder, read, runtime, resident)
            peak = max(peak, highest)
            if progress is not None:
                progress(done, len(holders))
        runtime.synchronize()
    return LoadReport(weight_bytes=resident, peak_bytes=peak, seconds=time.perf_counter() - started)


@contextmanager
def _reader(holders: Sequence[Holder], mapped: CheckpointMap, runtime: DeviceRuntime) -> Iterator[Read]:
    """What reads the holders' sources, which must be asked for in order."""
    dtype = torch_dtype(mapped.dtype)
    if not (runtime.asynchronous and mapped.in_files):
        yield lambda paths: mapped.load(paths, dtype, runtime)
        return
    plan = [run for holder in holders for paths in holder.sources for run in mapped.runs(paths)]
    with Feed(plan, dtype, runtime) as feed:

        def read(paths: Sequence[str]) -> torch.Tensor:
            tensor = mapped.empty(paths, dtype, runtime)
            feed.fill(tensor)
            return tensor

        yield read


def _fill(holder: Holder, read: Read, runtime: DeviceRuntime, resident: int) -> tuple[int, int]:
    """Load one holder. Returns device bytes held after it, and the most held meanwhile."""
    tensors = [read(paths) for paths in holder.sources]
    given = sum(t.numel() * t.element_size() for t in tensors)
    installed = holder.install(tensors, runtime)
    highest = resident + max(given + installed.peak_bytes, installed.nbytes)
    return resident + installed.nbytes, highest

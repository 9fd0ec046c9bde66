"""Sizes of a runner's tables and buffers, from its configuration and the decoder's cache groups."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from drivetrain.errors import ConfigError, DeviceError
from drivetrain.runner.adjusting import adjust_bytes
from drivetrain.runner.rows import START_FIELDS, TableShape, Words
from drivetrain_api.v1 import bucket, dtype_bytes

if TYPE_CHECKING:
    from drivetrain.models.decoder import Decoder
    from drivetrain_api.v1 import Backend

FIXED_CHUNK = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerConfig:
    """Sizes of a runner. ``depth``: plans in flight at most. ``max_drafts``: draft tokens a row and step at
    most.

    ``group_ids``: the plan's number of each of the decoder's cache groups; None where they are the same.
    ``first`` and ``last``: whether this runner holds the model's first and last layers (stages of a
    pipeline). ``max_adjusted``: rows whose logits are changed, at most.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    max_drafts: int = 0
    depth: int = 1
    group_ids: tuple[int, ...] | None = None
    first: bool = True
    last: bool = True
    max_adjusted: int = 0


def table_shape(backend: Backend, decoder: Decoder, config: RunnerConfig) -> TableShape:
    """Size the row tables. DeviceError when the backend's groups differ in slot dtype."""
    dtypes = sorted({group.layout.slot_dtype for group in decoder.groups}) or ["int64"]
    if len(dtypes) > 1:
        raise DeviceError(
            f"cache layouts differ in slot dtype: {', '.join(dtypes)}",
            fix="use one for all layouts of a backend",
        )
    blocks = backend.shapes.blocks_per_row
    widths = []
    for group in decoder.groups:
        needed = 1 if group.spec.kind == "recurrent" else -(-config.max_model_len // group.layout.block_tokens)
        widths.append(needed if needed == 1 and group.spec.kind == "recurrent" else fitted(blocks, needed, config))
    return TableShape(
        num_rows=config.max_num_seqs,
        max_drafts=config.max_drafts,
        widths=tuple(widths),
        slot_dtype=dtypes[0],
        chunk=0 if backend.shapes.dynamic else FIXED_CHUNK,
        adjusted=min(config.max_adjusted, config.max_num_seqs) if config.last else 0,
        vocabulary=decoder.spec.vocabulary,
    )


def fitted(buckets: tuple[int, ...], needed: int, config: RunnerConfig) -> int:
    """Return the block table width for the longest sequence. ConfigError when no bucket holds it."""
    try:
        return bucket(buckets, needed)
    except ValueError as error:
        raise ConfigError(
            f"--max-model-len {config.max_model_len} needs {needed} blocks a row: {error}",
            fix="give a smaller --max-model-len",
        ) from error


def staging_capacity(shape: TableShape, config: RunnerConfig) -> int:
    """Return the int32 elements of a usual step's upload; a slot grows when a step needs more."""
    rows, tokens, k = config.max_num_seqs + 1, config.max_num_batched_tokens + 1, config.max_drafts
    batch = 4 * rows + 1 + 3 * tokens
    samples = rows * (5 + 2 * (k + 1)) + rows * (k + 1)
    changes = 3 * START_FIELDS * rows + 3 * sum(min(width, 4) * rows for width in shape.widths) + 3 * 64
    return batch + samples + changes


def table_bytes(shape: TableShape) -> int:
    """Return the device bytes of ``RowTables`` of that shape."""
    index = dtype_bytes(shape.slot_dtype)
    rows = shape.num_rows + 1
    state = adjust_bytes(shape) + 4 * Words.of(shape).size
    return state + rows * sum(shape.widths) * index + 4 * (4 * rows + 1) + index * (rows + 1)

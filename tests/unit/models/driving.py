"""Drives a ``Decoder`` by hand: caches from ``torch_storage``, batches made here, no scheduler and no runner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch

from drivetrain.models.build import LoadReport, build, load
from drivetrain.models.decoder import Decoder
from drivetrain.models.families import read_spec
from drivetrain.models.source import resolve
from drivetrain.models.spec import ModelSpec
from drivetrain.models.step import Carry, ModelStep
from drivetrain.ops import Ops
from drivetrain_api.v1 import (
    AttentionBatch,
    Backend,
    Capabilities,
    ComposedBackend,
    generic_profiler,
    torch_runtime,
    torch_storage,
)

BLOCK = 16


def reference_backend(device_type: str = "cpu") -> Backend:
    """A backend without a single op of its own."""
    runtime = torch_runtime(device_type)
    return ComposedBackend(
        capabilities=Capabilities(model_dtypes=("float32", "bfloat16"), cache_dtypes=("float32", "bfloat16")),
        device=runtime,
        storage=torch_storage(runtime),
        memory=generic_profiler(runtime),
    )


def reference_ops() -> Ops:
    return Ops(reference_backend(), block_tokens=BLOCK)


def loaded(
    directory: str | Path, dtype: str = "float32", layers: range | None = None, reach: int = 0
) -> tuple[Decoder, LoadReport]:
    """A decoder of a checkpoint, on the reference. ``reach``: the longest sequence served, in tokens."""
    source = resolve(str(directory))
    ops = reference_ops()
    decoder = build(replace(read_spec(source.config, dtype), reach=reach), ops, layers=layers)
    checkpoint = source.open_checkpoint()
    report = load(decoder, checkpoint, ops.backend.device)
    checkpoint.close()
    return decoder, report


@dataclass
class Row:
    """One request: its blocks (scattered over the pool on purpose) and how many tokens it has computed."""

    blocks: list[int]
    computed: int = 0
    ids: list[int] = field(default_factory=list)


class Driver:
    """Rows over one decoder, or over the stages of one, each stage with caches of its own."""

    def __init__(self, *stages: Decoder, rows: int = 1, max_len: int = 256) -> None:
        self.stages = stages
        storage = reference_backend().storage
        width = -(-max_len // BLOCK)
        order = np.random.Generator(np.random.Philox(key=7)).permutation(rows * width) + 1
        self.rows = [Row(blocks=[int(b) for b in order[r * width : (r + 1) * width]]) for r in range(rows)]
        self._caches = []
        for stage in stages:
            caches = [None] * len(stage.layers)
            for group in stage.groups:
                for layer in group.layers:
                    caches[layer] = storage.allocate(group.layout, rows * width + 1)
                    data = caches[layer].parts
                    for part in data:
                        part.fill_(float("nan"))  # whatever is read without having been written shows up
            self._caches.append(tuple(caches))

    def step(self, chunks: dict[int, Sequence[int]], embeds: torch.Tensor | None = None) -> list[torch.Tensor]:
        """Run row -> its next ids, in that order; returns each row's logits [len(ids), vocabulary]."""
        with torch.no_grad():
            batch = self._batch(chunks)
            ids = torch.tensor([i for chunk in chunks.values() for i in chunk])
            carry: Carry = {}
            for stage, caches in zip(self.stages, self._caches, strict=True):
                if stage.first:
                    carry = stage.embed(ids)
                    if embeds is not None:
                        carry["hidden"] = embeds
                step = ModelStep(
                    ids=ids,
                    positions=batch.positions_dev,
                    token_rows=batch.token_row_dev,
                    plans=tuple(group.attention.plan(batch) for group in stage.groups),
                    caches=caches,
                )
                carry = stage.forward(carry, step)
            logits = self.stages[-1].logits(self.stages[-1].finish(carry))
        for row, chunk in chunks.items():
            self.rows[row].computed += len(chunk)
        return list(logits.split([len(chunk) for chunk in chunks.values()]))

    def _batch(self, chunks: dict[int, Sequence[int]]) -> AttentionBatch:
        counts = np.array([len(chunk) for chunk in chunks.values()])
        starts = np.concatenate(([0], counts.cumsum())).astype(np.int32)
        rows = [self.rows[r] for r in chunks]
        positions = np.concatenate([np.arange(r.computed, r.computed + n) for r, n in zip(rows, counts, strict=True)])
        token_row = np.repeat(np.arange(len(rows)), counts)
        table = np.array([r.blocks for r in rows])
        lengths = np.array([r.computed + n for r, n in zip(rows, counts, strict=True)])
        slots = table[token_row, positions // BLOCK] * BLOCK + positions % BLOCK
        return AttentionBatch(
            query_start_dev=torch.from_numpy(starts.astype(np.int64)),
            lengths_dev=torch.from_numpy(lengths),
            block_table_dev=torch.from_numpy(table),
            slots_dev=torch.from_numpy(slots),
            token_row_dev=torch.from_numpy(token_row),
            positions_dev=torch.from_numpy(positions),
            query_start_host=starts,
            length_bounds_host=lengths.astype(np.int32),
            host_lengths_exact=True,
            num_decode_rows=0,
            num_verify_rows=0,
            num_prefill_rows=len(rows),
            max_query_len=int(counts.max()),
            max_length_bound=int(lengths.max()),
        )


def run(decoder: Decoder, ids: Sequence[int], pieces: Sequence[int]) -> torch.Tensor:
    """Logits of one sequence computed in pieces of those lengths, [len(ids), vocabulary]."""
    assert sum(pieces) == len(ids)
    driver, done, parts = Driver(decoder), 0, []
    for piece in pieces:
        parts += driver.step({0: ids[done : done + piece]})
        done += piece
    return torch.cat(parts)


def small_spec(**changes: object) -> ModelSpec:
    """A tiny Llama's spec, without a file."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 97,
        "hidden_size": 20,
        "intermediate_size": 28,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 6,
        "max_position_embeddings": 256,
    }
    return read_spec({**config, **changes}, "float32")

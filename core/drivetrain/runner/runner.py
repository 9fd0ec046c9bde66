"""The runner: runs plans in order and draws their tokens. It decides nothing.

forward(plan)  one upload, row tables updated, the decoder's layers, hidden states of the tokens to be sampled
sample(id)     logits, draws, rows updated on the device, one copy to the host begun
poll()         the only place that waits for the device
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from drivetrain.errors import ConfigError, StepError
from drivetrain.moments import passed
from drivetrain.runner.batch import BatchArrays, BatchBuilder, BatchShape
from drivetrain.runner.caches import announce_freed, change_blocks, pack_freed
from drivetrain.runner.drawing import Drawer
from drivetrain.runner.flight import InFlight
from drivetrain.runner.forward import ForwardPass
from drivetrain.runner.graphs import Captured, DecodeGraphs, buckets_of
from drivetrain.runner.pooling import Pooler
from drivetrain.runner.reserve import Reserve
from drivetrain.runner.results import assemble, failed
from drivetrain.runner.rows import LOGPROBS, POOLING, RowTables
from drivetrain.runner.sampler import RowUpdate, Sampler, SampleSet, late_pack
from drivetrain.runner.sizes import RunnerConfig, staging_capacity, table_shape
from drivetrain.runner.staging import Pack, StagingRing
from drivetrain.sched.plan import LateInput, StepPlan, StepResult

if TYPE_CHECKING:
    from drivetrain.models.decoder import Decoder
    from drivetrain.models.step import Carry
    from drivetrain.ops import Ops
    from drivetrain.runner.drafter import Drafter
    from drivetrain_api.v1 import Backend, CacheHandle, Prepared

NO_FLAGS = np.zeros(0, np.uint16)
logger = logging.getLogger(__name__)


class Runner:
    """One device's rows, decoder and caches (``allocate_caches`` makes them). Not thread-safe: one thread
    owns it.

    Failures of device work become the plan's result, with ``failure_class`` from the runtime; the runner goes
    on.
    """

    def __init__(
        self,
        backend: Backend,
        decoder: Decoder,
        caches: Sequence[CacheHandle | None],
        config: RunnerConfig,
        ops: Ops,
        drafter: Drafter | None = None,
    ) -> None:
        self.backend, self.decoder, self.caches, self.config = backend, decoder, tuple(caches), config
        self.runtime, self.reserve = backend.device, Reserve(backend)
        group_ids = config.group_ids if config.group_ids is not None else tuple(range(len(decoder.groups)))
        shape = table_shape(backend, decoder, config)
        self.tables = RowTables(self.runtime, shape)
        paged = [i for i, group in enumerate(decoder.groups) if group.spec.kind != "recurrent"]
        if config.max_drafts and len(paged) < len(decoder.groups):
            raise ConfigError("a model with recurrent layers can't verify drafts", fix="set max_drafts to 0")
        self.builder = BatchBuilder(
            backend.shapes,
            padding_row=self.tables.padding_row,
            max_drafts=config.max_drafts,
            block_tokens=tuple(decoder.groups[i].layout.block_tokens for i in paged),
            max_widths=tuple(shape.widths[i] for i in paged),
        )
        self.ring = StagingRing(self.runtime, config.depth + 1, staging_capacity(shape, config))
        self.late_ring = StagingRing(self.runtime, config.depth + 1, 1)
        self.passes = ForwardPass(backend, decoder, self.caches, ops, self.tables, group_ids)
        self._group_ids = group_ids
        self._pooler = Pooler(self.runtime, self.tables)
        self._flights: deque[InFlight] = deque()
        self._sampler: Sampler | None = None
        if config.last:
            drawer = Drawer(
                ops,
                vocabulary=decoder.spec.vocabulary,
                fixed_shapes=not backend.shapes.dynamic,
                logits=decoder.logits,
                greedy=decoder.greedy,
            )
            self._sampler = Sampler(ops, self.tables, drawer, drafter)
        buckets = buckets_of(backend, decoder, config)
        self.graphs = DecodeGraphs(backend, self.passes, buckets, self.builder.max_widths, self._sampler)

    # -- forward ---------------------------------------------------------------------------------------------

    def forward(self, plan: StepPlan, carry: Carry | None = None) -> Carry | None:
        """Submit a plan. ``carry``: what the stage before sent; returned: what the next stage needs (None if last).

        Never waits for the device and never raises for what goes wrong inside a step.
        """
        flight = InFlight(plan)
        self._flights.append(flight)
        with self.runtime.activate(), torch.no_grad():
            try:
                self._forward(flight, carry)
            except Exception as error:
                self._fail(flight, error)
        carry, flight.carry = flight.carry, None
        return carry

    def _forward(self, flight: InFlight, carry: Carry | None) -> None:
        plan = flight.plan
        self.tables.note(plan)
        pack = self._changes(plan)
        try:
            captured = flight.captured = self.graphs.find(plan)
            batch = self.builder.arrays(plan, captured.shape if captured else self.builder.shape(plan))
            if plan.num_rows:
                self._choose_samples(flight, batch)
            if captured:
                self.graphs.pack(captured, batch, pack)
            else:
                self.passes.pack(plan, batch, pack)
            self._pack_samples(flight, pack)
        except Exception:
            self._apply(plan, self._changes(plan))
            raise
        passed("laid out")
        views = self._apply(plan, pack)
        change_blocks(self.runtime, self.caches, self.passes.places, plan, self.tables.shape.chunk)
        if plan.num_rows == 0:
            return
        passed("changed")
        if captured:
            self._replay(flight, captured, views)
        else:
            layers = partial(self._layers, flight, batch, views, self.passes.prepare(batch, views), carry)
            self.reserve.once_more(layers, self.passes.repeatable)
        passed("forward queued")

    def _changes(self, plan: StepPlan) -> Pack:
        """Begin an upload with what later plans rely on even if this one can't run: row changes, freed blocks."""
        pack = Pack()
        self.tables.pack(plan, self._group_ids, pack)
        pack_freed(plan, self.passes.places, self.tables.shape.chunk, pack)
        return pack

    def _apply(self, plan: StepPlan, pack: Pack) -> dict[str, torch.Tensor]:
        """Upload a pack and queue what ``_changes`` put into it; returns its views."""
        views = pack.upload(self.ring, self.runtime)
        passed("uploaded")
        announce_freed(self.caches, self.passes.places, plan, views)
        self.tables.apply(views)
        return views

    def _layers(
        self,
        flight: InFlight,
        batch: BatchArrays,
        views: dict[str, torch.Tensor],
        prepared: Prepared,
        carry: Carry | None,
    ) -> None:
        plan, facts = flight.plan, flight.facts
        step = self.passes.step(plan, batch, views, prepared, facts)
        if carry is None:
            if not self.config.first:
                raise StepError(f"the stage before sent nothing for plan {plan.plan_id}")
            carry = self.passes.embed(plan, prepared.ids)
        carry = self.decoder.forward(carry, step)
        if not self.config.last:
            flight.carry = carry
            return
        if facts & POOLING:
            hidden = self.decoder.finish(carry)
            flight.pooled = self._pooler.run(plan, batch, hidden)
            self._keep_hidden(flight, views, prepared, hidden)
            return
        for prefix, part in flight.sets():
            part.adopt(prefix, views)
            if part.arrays.whole:
                part.hidden = self.decoder.finish(carry)
                part.lengths = part.positions = prepared.lengths
                continue
            picked = {name: tensor.index_select(0, part.views["tokens"]) for name, tensor in carry.items()}
            part.take(prepared, self.decoder.finish(picked))

    def _replay(self, flight: InFlight, captured: Captured, views: dict[str, torch.Tensor]) -> None:
        self.graphs.run(captured, views)
        for prefix, part in flight.sets():
            if part.arrays.whole and captured.draws(flight.facts):
                captured.ready(part)
            elif part.arrays.whole:
                captured.sample_set(part, views.get(prefix + "slots"))
            else:
                part.adopt(prefix, views)
                part.take(captured.prepared, captured.hidden.index_select(0, part.views["tokens"]))

    def _keep_hidden(
        self, flight: InFlight, views: dict[str, torch.Tensor], prepared: Prepared, hidden: torch.Tensor
    ) -> None:
        for prefix, part in flight.sets():
            part.adopt(prefix, views)
            part.take(prepared, hidden.index_select(0, part.views["tokens"]))

    def _choose_samples(self, flight: InFlight, batch: BatchArrays) -> None:
        """Split the sampling rows into early and late ones; rows that pool draw nothing."""
        plan = flight.plan
        captured = flight.captured
        steady = (batch.steady if captured is None else captured.steady) and not plan.late_rows
        flags = NO_FLAGS if steady and self.tables.plain() else self.tables.row_flags(plan.rows)
        flight.facts = facts = int(np.bitwise_or.reduce(flags)) if len(flags) else 0
        if not self.config.last:
            return
        whole = steady and not facts & POOLING
        if captured is not None and not whole and not plan.late_rows and captured.draws(facts):
            whole = bool(plan.sample.any())
        if whole:
            wants = self.tables.logprobs[plan.rows] if facts & LOGPROBS else None
            arrays = self.builder.whole(plan, batch.rows)
            flight.early = SampleSet(arrays=arrays, facts=facts, generation=None, wants_logprobs=wants, views={})
            return
        draws = plan.sample & ((flags & POOLING) == 0) if facts & POOLING else plan.sample
        if not plan.late_rows:
            flight.early = self._sample_set(plan, batch, np.flatnonzero(draws), flags)
            return
        late = np.zeros(plan.num_rows, bool)
        late[list(plan.late_rows)] = True
        flight.early = self._sample_set(plan, batch, np.flatnonzero(draws & ~late), flags)
        flight.late = self._sample_set(plan, batch, np.flatnonzero(draws & late), flags)
        if flight.late is not None:
            flight.late.generation = self.tables.generation[plan.rows[flight.late.arrays.index]]

    def _sample_set(self, plan: StepPlan, batch: BatchArrays, index: np.ndarray, flags: np.ndarray) -> SampleSet | None:
        if len(index) == 0:
            return None
        facts = int(np.bitwise_or.reduce(flags[index]))
        return SampleSet(
            arrays=self.builder.samples(plan, batch, index.astype(np.int32)),
            facts=facts,
            generation=None,
            wants_logprobs=self.tables.logprobs[plan.rows[index]] if facts & LOGPROBS else None,
            views={},
        )

    def _pack_samples(self, flight: InFlight, pack: Pack) -> None:
        for prefix, part in flight.sets():
            part.pack(prefix, pack, self.tables)

    def capture(self, plan: StepPlan, shape: BatchShape) -> None:
        """Record the bucket of a shape by a dummy plan that fills it."""
        with self.runtime.activate(), torch.no_grad():
            self.reserve.measured(lambda: self.graphs.capture(plan, self.builder.arrays(plan, shape)))

    def rehearse(self, plan: StepPlan, shape: BatchShape) -> None:
        """Run what ``capture`` would record."""
        with self.runtime.activate(), torch.no_grad():
            self.graphs.rehearse(plan, self.builder.arrays(plan, shape))

    # -- sample ----------------------------------------------------------------------------------------------

    def sample(self, plan_id: int, late: LateInput | None) -> RowUpdate | None:
        """Sample a plan's rows: with None all but the late ones, else those that ``late`` names. Never waits.

        Returns the change of the rows, for a pipeline's first stage. ValueError for a plan that is not in
        flight.
        """
        flight = next((f for f in self._flights if f.plan.plan_id == plan_id), None)
        if flight is None:
            raise ValueError(f"plan {plan_id} is not in flight")
        if self._sampler is None:
            raise ValueError(f"plan {plan_id}: this runner does not hold the last layers, so it can't sample")
        with self.runtime.activate(), torch.no_grad():
            try:
                return self._sample_late(flight, late) if late is not None else self._sample_early(flight)
            except Exception as error:
                self._fail(flight, error)
        return None

    def _sample_early(self, flight: InFlight) -> RowUpdate | None:
        flight.sampled = True
        if flight.failure:
            return None
        update: RowUpdate | None = None
        tensors: list[torch.Tensor] = []
        if flight.early is not None:
            update, tensors = self._draw(flight, flight.early, None)
            passed("draws queued")
        if flight.pooled:
            tensors = [*tensors, *(pooled.total for pooled in flight.pooled)]
        if tensors:
            copy = self.runtime.to_host(tensors)
            flight.pooled_copy = copy if flight.pooled else None
            if flight.early is not None:
                flight.early.copy = copy
        else:
            flight.done = self.runtime.stream().record()
        return update

    def _sample_late(self, flight: InFlight, late: LateInput) -> RowUpdate | None:
        if flight.failure:
            return None
        part = flight.late
        if part is None or part.copy is not None:
            raise ValueError(f"plan {flight.plan.plan_id} has no late rows left to sample")
        alive = self._alive(part)
        named = np.isin(part.arrays.index, late.indices)
        if (alive & ~named).any():
            missing = part.arrays.index[alive & ~named].tolist()
            raise ValueError(f"plan {flight.plan.plan_id}: late input leaves out batch rows {missing}")
        part.given_up = ~(alive & named)
        pack = late_pack(part, late, part.given_up, self.tables, self.decoder.spec.vocabulary)
        uploaded = pack.upload(self.late_ring, self.runtime)
        part.views |= uploaded
        update, tensors = self._draw(flight, part, uploaded["mask"])
        part.copy = self.runtime.to_host(tensors)
        return update

    def _draw(
        self, flight: InFlight, part: SampleSet, mask: torch.Tensor | None
    ) -> tuple[RowUpdate, list[torch.Tensor]]:
        assert self._sampler is not None
        flight.parts.append(part)
        captured = flight.captured
        if captured is not None and part.arrays.whole and captured.draws(flight.facts):
            return captured.draw(part)
        return self.reserve.once_more(partial(self._sampler.run, part, mask), lambda: part.hidden is not None)

    def _alive(self, part: SampleSet) -> np.ndarray:
        """Which rows of a set still belong to the request that the plan meant, [n] bool."""
        rows = part.arrays.rows[: part.arrays.count]
        alive: np.ndarray = self.tables.generation[rows] == part.generation
        return alive

    def update_rows(self, update: RowUpdate) -> None:
        """Take over what the last stage drew (first stage of a pipeline)."""
        with self.runtime.activate(), torch.no_grad():
            self.tables.computed[update.rows] = update.computed.to(torch.int32)
            self.tables.last_tokens[update.rows] = update.last_tokens

    # -- results ---------------------------------------------------------------------------------------------

    def poll(self, wait: bool) -> StepResult | None:
        """Return the oldest plan's result. None while it is not complete: nothing is in flight, its late rows
        have not been sampled, or (without ``wait``) the device has not finished."""
        if not self._flights:
            return None
        flight = self._flights[0]
        if not flight.failure and not (self._complete(flight) and (wait or flight.ready())):
            return None
        self._flights.popleft()
        if not flight.failure:
            try:
                return self._result(flight)
            except Exception as error:
                self._fail(flight, error)
        return failed(flight.plan, flight.failure, flight.failure_class)

    def _complete(self, flight: InFlight) -> bool:
        late = flight.late
        if not self.config.last:
            return True
        return flight.sampled and (late is None or late.copy is not None or not self._alive(late).any())

    def _result(self, flight: InFlight) -> StepResult:
        if flight.done is not None:
            flight.done.wait()
        copied = [part.copy.get() for part in flight.parts if part.copy is not None]
        totals = flight.pooled_copy.get()[-len(flight.pooled) :] if flight.pooled_copy is not None else ()
        pooled = [(p.index, total / p.count) for p, total in zip(flight.pooled, totals, strict=True)]
        return assemble(flight.plan, flight.parts, copied, pooled)

    def _fail(self, flight: InFlight, error: Exception) -> None:
        logger.error("plan %d failed", flight.plan.plan_id, exc_info=error)
        self.graphs.forget_rows()
        flight.failure = f"{type(error).__name__}: {error}"
        flight.failure_class = self.runtime.classify_error(error).value
        flight.parts.clear()
        flight.early = flight.late = None
        flight.pooled.clear()

    @property
    def in_flight(self) -> int:
        """Plans submitted and not yet polled."""
        return len(self._flights)

    def close(self) -> None:
        """Forget what is in flight, release graphs and drop the caches."""
        self._flights.clear()
        self.graphs.close()
        self.caches, self.reserve.giving = (), None
        self.passes.close()

"""``engine bench latency|throughput``: token-id prompts, greedy, end tokens ignored, medians over repeats."""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from drivetrain.cli.flags import ENGINE_FLAGS, add_flags, add_json, add_model, configs, within, write_json
from drivetrain.errors import ConfigError, StepError
from drivetrain.params import GenerateRequest, SamplingParams

if TYPE_CHECKING:
    from drivetrain.loop import Loop

MOST = 1 << 20  # requests of a pass, whose ids are numbered from a multiple of it


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """One measured load: ``num_requests`` prompts of ``input_len`` tokens, ``output_len`` new tokens each."""

    num_requests: int
    input_len: int
    output_len: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Seconds of one pass. ``first_token``: until the first token of the slowest request."""

    total: float
    first_token: float
    steps: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's flags."""
    positive = within(1, MOST)
    parser.add_argument("what", choices=("latency", "throughput"), help="one batch's latency, or a queue's throughput")
    add_model(parser)
    add_flags(parser, ENGINE_FLAGS)
    parser.add_argument("--input-len", type=positive, default=128, metavar="N", help="prompt tokens (default 128)")
    parser.add_argument("--output-len", type=positive, default=128, metavar="N", help="new tokens (default 128)")
    parser.add_argument("--batch-size", type=positive, default=1, metavar="N", help="latency: requests together")
    parser.add_argument("--num-prompts", type=positive, default=32, metavar="N", help="throughput: requests in all")
    parser.add_argument("--num-iters", type=positive, default=3, metavar="N", help="measured passes (default 3)")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Measure and print; the numbers are medians over the passes after one warm-up pass."""
    from drivetrain.ahead import resolve_and_load
    from drivetrain.launch import open_loop

    config, _ = configs(arguments)
    choice = resolve_and_load(config)
    shape = Shape(
        num_requests=arguments.batch_size if arguments.what == "latency" else arguments.num_prompts,
        input_len=arguments.input_len,
        output_len=arguments.output_len,
    )
    opened = open_loop(config, choice)
    try:
        if shape.input_len + shape.output_len > opened.max_model_len:
            raise ConfigError(
                f"--input-len {shape.input_len} and --output-len {shape.output_len} make more than the"
                f" {opened.max_model_len} tokens of the longest sequence",
                fix="lower one of them",
            )
        timings = [one_pass(opened.loop, shape, opened.vocabulary, index) for index in range(arguments.num_iters + 1)]
    finally:
        opened.loop.close()
    data = report(arguments.what, shape, timings[1:])
    data |= {"model": config.model, "device": choice.name, "wheel": choice.wheel, "dtype": opened.dtype}
    if arguments.json:
        write_json(arguments.json, data)
    else:
        for name, value in data.items():
            print(f"{name}: {value:.4g}" if isinstance(value, float) else f"{name}: {value}")
    return 0


def one_pass(loop: Loop, shape: Shape, vocabulary: int, index: int) -> Timing:
    """Run one pass to its end. Prompts differ from pass to pass, so that none is answered from the prefix cache."""
    draws = np.random.default_rng(1000 + index)
    waiting = set(range(index << 20, (index << 20) + shape.num_requests))
    begin = time.perf_counter()
    steps = loop.steps
    for request_id in sorted(waiting):
        loop.submit(
            GenerateRequest(
                request_id=request_id,
                prompt_ids=draws.integers(0, vocabulary, shape.input_len, dtype=np.int32),
                sampling=SamplingParams(temperature=0.0, ignore_eos=True),
                max_tokens=shape.output_len,
                seed=0,
            )
        )
    first: dict[int, float] = {}
    running = set(waiting)
    while running:
        for outputs in loop.step():
            if len(first) < shape.num_requests:
                now = time.perf_counter() - begin
                for request_id in outputs.request_ids.tolist():
                    first.setdefault(request_id, now)
            for end in outputs.finished:
                if end.reason == "error":
                    raise StepError(f"request {end.request_id} failed: {end.error}")
                running.discard(end.request_id)
    return Timing(total=time.perf_counter() - begin, first_token=max(first.values()), steps=loop.steps - steps)


def report(what: str, shape: Shape, timings: list[Timing]) -> dict[str, Any]:
    """Summarise passes: medians and the spread."""
    total = statistics.median(t.total for t in timings)
    first = statistics.median(t.first_token for t in timings)
    decode = [(t.total - t.first_token) / max(1, shape.output_len - 1) for t in timings]
    data: dict[str, Any] = {"benchmark": what, **asdict(shape), "passes": len(timings), "seconds": total}
    data["seconds_min"], data["seconds_max"] = min(t.total for t in timings), max(t.total for t in timings)
    data["first_token_seconds"] = first
    data["seconds_a_decode_step"] = statistics.median(decode)
    data["output_tokens_per_second"] = shape.num_requests * shape.output_len / total
    data["prompt_tokens_per_second"] = shape.num_requests * shape.input_len / first
    if what == "latency" and shape.output_len > 1:
        data["decode_tokens_per_second"] = shape.num_requests / data["seconds_a_decode_step"]
    return data

"""Greedy rows on a device: the head's product and the draw apart, and the same without logits, in CUDA graphs.

    python ci/perf/device_head.py [--shapes A,C] [--rows 2,8,64,256,512] [--json FILE]

Tokens are checked first against the logits apart: a row may differ only where two of its logits differ by rounding.
Times are medians over replays of a graph of several calls, whatever ``linear_tiles.is_best_kept`` says (``taken``); the
way apart is timed before and after, since a card that is hot is slower. ``keys_us``: the product alone, without the
choice among its tiles.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from device_rates import about
from device_wide import target
from linear_parts import DEVICE, SHAPES, launch, timed

from drivetrain_api.v1 import DrawSpec, SamplingInputs
from drivetrain_triton.draws import Draw
from drivetrain_triton.linear import prepare, small_linear
from drivetrain_triton.linear_head import best_call, best_tokens, empty_best
from drivetrain_triton.linear_tiles import STREAM_ROWS, is_best_kept
from drivetrain_triton.target import Target

ROWS, CALLS, LIMIT = "2,8,64,256,512", 4, 1e-3  # calls a graph; how far a token's logit may be below the largest


def greedy(rows: int) -> SamplingInputs:
    """Inputs of rows that are all greedy."""
    each = torch.zeros(rows, device=DEVICE)
    facts = {"all_greedy": True, "any_top_k": False, "any_top_p": False, "any_min_p": False}
    return SamplingInputs(temperature=each, top_k=each.int(), top_p=each + 1, min_p=each, seed=each.long(),
                          position=each.int(), sample=each.int(), mask=None, **facts)  # fmt: skip


def logits_of(x: torch.Tensor, weight: torch.Tensor, chip: Target) -> torch.Tensor:
    """The head as the backend multiplies it."""
    if len(x) <= STREAM_ROWS:
        return small_linear(x, weight, None, torch.float32, chip)
    return torch.mm(x, weight.t(), out_dtype=torch.float32)


def agreement(tokens: torch.Tensor, best: torch.Tensor, logits: torch.Tensor) -> dict[str, Any]:
    """How many tokens are those of the logits, and how far the others' logits are below, as a part of the largest."""
    top = logits.max(1).values
    below = (top - logits.gather(1, tokens.long()[:, None])[:, 0]) / top.abs()
    told = ((best - top).abs() / top.abs()).max()
    facts = {"same": int((tokens == logits.argmax(1)).sum()), "below": float(below.max()), "told": float(told)}
    return facts | {"right": max(facts["below"], facts["told"]) < LIMIT}


def point(name: str, weight: torch.Tensor, rows: int, chip: Target) -> dict[str, Any]:
    """One shape and number of rows: microseconds each way, and whether the tokens were right."""
    vocabulary, inputs, _ = SHAPES[name]
    x = torch.randn(rows, inputs, device=DEVICE).bfloat16()
    draw, given = Draw(DrawSpec(dtype="float32", vocabulary=vocabulary), chip), greedy(rows)
    found = agreement(*best_tokens(x, weight, chip), logits_of(x, weight, chip))
    call = best_call(x, weight, empty_best(x, weight, chip), chip)

    def each(work: Callable[[], Any]) -> float:
        return round(timed(lambda: [work() for _ in range(CALLS)] and None) / CALLS * 1e6, 2)

    times = {
        "head_us": each(lambda: logits_of(x, weight, chip)),
        "apart_us": each(lambda: draw(logits_of(x, weight, chip), given, 0)),
        "best_us": each(lambda: best_tokens(x, weight, chip)),
        "keys_us": each(lambda: launch(call)),
        "apart_again_us": each(lambda: draw(logits_of(x, weight, chip), given, 0)),
    }
    gain = round(min(times["apart_us"], times["apart_again_us"]) - times["best_us"], 2)
    taken = is_best_kept(rows, vocabulary, inputs, chip.arch, 2, chip.multiprocessors)
    bytes_kept = rows * call.args[2 if rows > STREAM_ROWS else 3].shape[1] * 8
    return {"shape": name, "rows": rows, "taken": taken, **found, **times, "gain_us": gain, "key_bytes": bytes_kept}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="A,C")
    parser.add_argument("--rows", default=ROWS)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    chip, found = target(), []
    prepare(torch.empty(1, device=DEVICE).device)
    torch.manual_seed(0)
    for name in (f"{model}.head" for model in args.shapes.split(",")):
        outs, inputs, _ = SHAPES[name]
        weight = torch.empty(outs, inputs, device=DEVICE, dtype=torch.bfloat16).normal_(std=inputs**-0.5)
        for rows in map(int, args.rows.split(",")):
            found.append(point(name, weight, rows, chip))
            print(json.dumps(found[-1]), flush=True)
            torch.cuda.empty_cache()
            if args.json:
                facts = about(torch.device(DEVICE)) | {"points": found}
                args.json.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    return int(not all(one["right"] for one in found))


if __name__ == "__main__":
    raise SystemExit(main())

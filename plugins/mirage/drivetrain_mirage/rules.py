"""What goes wrong on this device, and how it says so. Every message names the rule, the culprit and the fix."""

from __future__ import annotations


class RuleError(RuntimeError):
    """The caller broke one of the device's rules. ``rule`` is its short name, as in ``RULES``."""

    def __init__(self, rule: str, what: str, fix: str) -> None:
        super().__init__(f"mirage rule {rule!r} ({RULES[rule]}): {what}. Fix: {fix}")
        self.rule = rule


class DeviceLost(RuntimeError):
    """The device no longer answers."""


RULES: dict[str, str] = {
    "declared-ops": "only the ops of the declared list run",
    "declared-dtypes": "float32, bfloat16, int32, int64, uint8 and bool exist; float64 only between pointwise ops",
    "no-host-reads": "device values reach the host through DeviceRuntime.to_host only",
    "fixed-shapes": "no result's shape may depend on values",
    "one-device": "an op's tensors live on this device; host tensors only as scalars without dimensions",
    "runtime-allocates": "tensors are made by DeviceRuntime, or from a tensor that is on the device already",
    "int32-slots": "slots and block ids are int32",
    "block-size": "a block holds 128 tokens",
    "no-pool": "every layer has an arena of its own",
    "four-graphs": "at most four graphs exist at once",
    "no-waits-in-capture": "a capture neither waits nor copies to or from the host",
    "released-graph": "a released graph can't be replayed",
    "stable-upload": "the source of an upload stays unchanged until an event recorded after it is done",
    "shape-buckets": "a step has a shape of the buckets",
    "no-late-compile": "nothing is compiled after ready",
    "given-back": "memory that was given back is not touched",
    "compile-budget": "only so many shapes are compiled before ready",
}

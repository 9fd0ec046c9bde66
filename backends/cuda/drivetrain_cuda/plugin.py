"""The four hooks. Nothing here imports torch before ``create``."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from threading import Thread

from drivetrain_api.v1 import (
    Backend,
    BackendInfo,
    ConfigView,
    DeviceRecord,
    OptionSpec,
    Unavailable,
    hookimpl,
)

from . import __version__
from .driver import DriverError, cards, make_context

OLDEST = (8, 0)  # bfloat16 products and asynchronous copies, which every kernel relies on
# Names of the same setting. The first is the one that every torch served reads for CUDA; where both are set it wins.
ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
OPTIONS = (
    OptionSpec(
        key="graphs",
        kind="str",
        help="capture decode steps in CUDA graphs",
        default="on",
        choices=("on", "off"),
    ),
    OptionSpec(
        key="overlap",
        kind="str",
        help="let a kernel begin while the one ahead ends (compute capability 9.0 and later)",
        default="on",
        choices=("on", "off"),
    ),
    OptionSpec(
        key="compile",
        kind="str",
        help="where many kernels are compiled at a start",
        default="processes",
        choices=("processes", "threads"),
    ),
    OptionSpec(
        key="give_back",
        kind="str",
        help="hold the cache in memory whose end can be given back where captured steps need more than planned",
        default="on",
        choices=("on", "off"),
    ),
    OptionSpec(
        key="greedy_head",
        kind="str",
        help="draw greedy rows inside the head's product where that gains (compute capability 9.0)",
        default="on",
        choices=("on", "off"),
    ),
)


class CudaPlugin:
    """This wheel's entry point."""

    @hookimpl
    def backend_info(self) -> BackendInfo:
        """Say who this is."""
        return BackendInfo(
            name="cuda",
            vendor="Drivetrain",
            wheel=f"drivetrain-cuda {__version__}",
            api=">=0.1,<0.2",
            torch_device_type="cuda",
            options=OPTIONS,
            proof="measured",
            notes="checked on one H200 (torch 2.11, Triton 3.6); other cards are expected to work, not run",
        )

    @hookimpl
    def environment(self, devices: Sequence[int], view: ConfigView) -> Mapping[str, str]:
        """Memory that grows in place: steps of ever other sizes then leave no holes. The user's own setting stands."""
        if any(name in os.environ for name in ALLOCATOR):
            return {}
        return {ALLOCATOR[0]: "expandable_segments:True"}

    @hookimpl
    def probe(self) -> Sequence[DeviceRecord] | Unavailable:
        """Ask the driver."""
        try:
            found = cards()
        except DriverError as error:
            return Unavailable(reason=error.reason, fix=error.fix)
        able = [card for card in found if card.capability >= OLDEST]
        if not able:
            names = ", ".join(f"{c.name} ({c.capability[0]}.{c.capability[1]})" for c in found) or "none"
            return Unavailable(
                reason=f"no device of compute capability 8.0 or later: {names}",
                fix="use a card from Ampere on, or check CUDA_VISIBLE_DEVICES",
            )
        return tuple(
            DeviceRecord(
                index=card.index,
                name=card.name,
                uuid=card.uuid,
                memory_bytes=card.memory_bytes,
                architecture=f"sm_{card.capability[0]}{card.capability[1]}",
            )
            for card in able
        )

    @hookimpl
    def create(self, devices: Sequence[int], view: ConfigView) -> Backend | Unavailable:
        """Open the first device. Its context is made while torch loads."""
        if find_spec("triton") is None:
            return Unavailable(
                reason="Triton is not installed", fix="pip install triton (torch's CUDA builds ask for it)"
            )
        index = devices[0] if devices else 0
        ahead = Thread(target=make_context, args=(index,), daemon=True)
        ahead.start()
        from .backend import open_backend

        ahead.join()
        return open_backend(index, view)


plugin = CudaPlugin()

"""Launching kernels with less work on the host, and compiling many of them side by side.

``@kernel`` stands above ``@triton.jit`` (or Gluon's); call sites stay ``name[grid](*args, **options)``. The first
launch of a kind is Triton's own. Later ones of the same kind skip it: they find the compiled kernel by a key that tells
apart all that Triton does, each run-time argument by Triton's own function. So they must give run-time arguments by
place and all else by name. Triton's own way is taken for everything else, and while launches are observed by hooks.
Beyond the first launch, Triton's settings from the environment and the globals that a kernel reads are not looked at
again.

Under the interpreter, and where this Triton lacks the parts used here (a warning says so), nothing is changed.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import repeat
from threading import Thread
from typing import Any

import torch
import triton
from torch.overrides import TorchFunctionMode
from triton import knobs
from triton.compiler import make_backend
from triton.runtime import driver
from triton.runtime.cache import get_cache_manager, triton_key
from triton.runtime.jit import JITFunction

from drivetrain_api.v1 import CompileReport

from . import workers

try:
    from triton._C.libtriton import native_specialize_impl
    from triton.runtime._async_compile import FutureKernel, active_mode

    ABLE = hasattr(knobs.runtime, "launch_enter_hook")
except ImportError:
    ABLE = False

MOST_THREADS = 32
# Kernels that take longest to compile (seconds, where others take a fifth of one): they are begun first.
SLOW = (
    "prompt_kernel", "prefill_kernel", "token_kernel", "decode_kernel", "_limits", "_scan", "stream_products",
    "panel_products", "wide_products", "wide_best", "invariant_kernel", "invariant_products",
)  # fmt: skip
RUNTIME = knobs.runtime
NOT_CONST = repeat(False)
UNFILLED = {torch.empty, torch.empty_strided, torch.empty_like, torch.Tensor.new_empty, torch.Tensor.new_empty_strided}
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Made:
    """A kernel that has run. ``constants``: what its call passes after the run-time arguments."""

    run: Callable[..., None]
    function: Any
    metadata: Any
    constants: tuple[Any, ...]
    compiled: Any


class Kernel(JITFunction):  # type: ignore[misc]
    """A kernel whose later launches are quick."""

    def __init__(self, plain: JITFunction) -> None:
        super().__init__(
            plain.fn,
            version=plain.version,
            do_not_specialize=plain.do_not_specialize,
            do_not_specialize_on_alignment=plain.do_not_specialize_on_alignment,
            debug=plain.debug,
            noinline=plain.noinline,
            repr=plain._repr,
            launch_metadata=plain.launch_metadata,
        )
        given = [param for param in self.params if not param.is_constexpr]
        self._whole = tuple(not param.do_not_specialize for param in given)
        self._aligned = tuple(not param.do_not_specialize_on_alignment for param in given)
        self._constants = [(p.name, p.default) for p in self.params if p.is_constexpr]
        self._simple = self.params[: len(given)] == given and not any(param.annotation for param in given)
        self._driver: Any = None
        self._backend: Any = None
        self._made: dict[tuple[Any, ...], Made] = {}

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        return partial(self._launch, grid)

    def _launch(self, grid: Any, *args: Any, **options: Any) -> Any:
        pool = COLLECTING.get()
        if pool is not None:
            return pool.take(self, grid, args, options)
        active = driver.active
        device = active.get_current_device()
        key = self.key(active, device, args, options)
        made = self._made.get(key)
        if made is None or observed() or self.pre_run_hooks or callable(grid):
            return self._first(key, grid, args, options)
        x, y, z = grid if len(grid) == 3 else (*grid, 1, 1)[:3]
        stream = active.get_current_stream(device)
        made.run(x, y, z, stream, made.function, made.metadata, None, None, None, *args, *made.constants)
        return made.compiled

    def key(self, active: Any, device: int, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, ...]:
        """What tells launches apart that need different code: at least what Triton tells apart."""
        if active is not self._driver:
            self._driver, self._backend = active, self.device_caches[device][3]
            self._made.clear()
        kinds = map(native_specialize_impl, repeat(self._backend), args, NOT_CONST, self._whole, self._aligned)
        return (device, *kinds, *options, *options.values())

    def _first(self, key: tuple[Any, ...], grid: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Launch by Triton, and keep what it ran where that says all about the next launch of the key."""
        compiled = self.run(*args, grid=grid, warmup=False, **options)
        names = {name for name, _ in self._constants}
        whole = self._simple and len(args) == len(self._whole) and names <= options.keys()
        if whole and hasattr(compiled, "packed_metadata"):
            constants = tuple(options[name] for name, _ in self._constants)
            self._made[key] = Made(compiled.run, compiled.function, compiled.packed_metadata, constants, compiled)
        return compiled


def observed() -> bool:
    """Whether someone wants to hear of launches."""
    enter, leave = RUNTIME.launch_enter_hook, RUNTIME.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


def kernel(plain: Any) -> Any:
    """Make a function of ``@triton.jit`` a ``Kernel``; one that is interpreted stays what it is."""
    if not isinstance(plain, JITFunction) or isinstance(plain, Kernel):
        return plain
    if not ABLE:
        logger.warning("Triton %s: %s is launched by Triton's own, slower way", triton.__version__, plain.__name__)
        return plain
    return quick(type(plain))(plain)


@cache
def quick(kind: type[JITFunction]) -> type[Kernel]:
    """``Kernel`` for one of Triton's languages; its own function type decides how a kernel is compiled."""
    return Kernel if kind is JITFunction else type(f"Quick{kind.__name__}", (Kernel, kind), {})


class Zeros(TorchFunctionMode):
    """New tensors begin as zeros: what a kernel that did not run would have written is then no stray index."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        return made.zero_() if func in UNFILLED else made


class Late(Future[Any]):
    """A result that is made when it is asked for, where ``late`` says how."""

    late: Callable[[], None] | None = None

    def result(self, timeout: float | None = None) -> Any:
        """Return the result, made first if need be."""
        make, self.late = self.late, None
        if make is not None:
            make()
        return super().result(timeout)


@dataclass(slots=True, eq=False)
class Wanted:
    """One kernel that is to be there. ``result``: the compiled kernel, loaded; ``stored``: it lies on disk already."""

    name: str
    compile_one: Callable[[], Any]
    stored: bool
    result: Late = field(default_factory=Late)

    def compile(self) -> None:
        """Leave the kernel, and the code that launches it, in Triton's cache. No device is touched."""
        compiled = self.compile_one()
        driver.active.launcher_cls(compiled.src, compiled.metadata)

    def take(self) -> None:
        """Compile, or find in the cache, and load the code with all that its launches need: done here, it delays no
        launch."""
        try:
            compiled = self.compile_one()
            _ = compiled.run
        except Exception as error:
            self.result.set_exception(error)
        else:
            self.result.set_result(compiled)

    @property
    def rank(self) -> int:
        """Small for what is begun first."""
        return SLOW.index(self.name) if self.name in SLOW else len(SLOW)


@dataclass(slots=True, eq=False)
class Pool:
    """Compilations that are asked for. Triton hands them over by ``submit``; those that lie on disk are loaded at
    once, the others compiled by ``finish``."""

    executor: Executor
    device: int
    count: int
    processes: bool
    name: str = ""
    seen: set[tuple[Any, ...]] = field(default_factory=set)
    wanted: dict[Any, tuple[Wanted, Any]] = field(default_factory=dict)

    def take(self, function: Kernel, grid: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Have the kernel of a launch compiled. The launch itself does not happen."""
        key = (function, *function.key(driver.active, self.device, args, options))
        if key in self.seen:
            return
        self.seen.add(key)
        self.name = function.__name__
        token = active_mode.set(self)
        try:
            function.run(*args, grid=grid, warmup=True, **options)
        finally:
            active_mode.reset(token)

    def submit(self, key: Any, compile_one: Callable[[], Any], finish: Callable[[Any], None]) -> Any:
        """Note one compilation; called by Triton."""
        if key not in self.wanted:
            one = Wanted(self.name, compile_one, stored(key, self.name))
            self.wanted[key] = one, FutureKernel(finish, one.result)
            if one.stored:
                self.executor.submit(one.take)
        return self.wanted[key][1]

    def finish(self, report: CompileReport) -> list[tuple[str, Exception]]:
        """Compile what is missing and wait for all; the names of kernels that failed, and why. The processes begin
        with what takes longest; each kernel is loaded here as soon as it is there."""
        missing = sorted((one for one, _ in self.wanted.values() if not one.stored), key=lambda one: one.rank)
        report.built, report.found = len(missing), len(self.wanted) - len(missing)
        for one, _ in self.wanted.values():
            if one.stored:
                one.result.exception()  # no thread here is at work when processes are forked
        begun = set()
        if self.processes and workers.worth_it(len(missing), self.count):
            for place in workers.run_all([one.compile for one in missing], self.count):
                begun.add(place)
                self.executor.submit(missing[place].take)
        for place, one in enumerate(missing):
            if place not in begun:
                self.executor.submit(one.take)
        return list(self.failures())

    def leave(self) -> None:
        """Compile nothing now: whoever launches such a kernel after all compiles it then."""
        for one, _ in self.wanted.values():
            if not one.result.done():
                one.result.late = one.take

    def failures(self) -> Iterator[tuple[str, Exception]]:
        """Wait for all; the names of kernels that failed, and why."""
        for one, future in self.wanted.values():
            try:
                future.result()
            except Exception as error:
                yield one.name, error


def stored(key: str, name: str) -> bool:
    """Whether a kernel lies in Triton's cache. ``key``: what Triton tells compilations apart by."""
    if knobs.compilation.always_compile:
        return False
    manager = get_cache_manager(hashlib.sha256(key.encode()).hexdigest())
    file = f"{name[:150]}.json"
    return file in (manager.get_group(file) or {})


COLLECTING: ContextVar[Pool | None] = ContextVar("drivetrain_triton_collecting", default=None)


@contextmanager
def compiling(threads: int = 0, *, processes: bool = True) -> Iterator[CompileReport]:
    """In this context kernels do not run: each launch only names the compilation that it needs, and tensors begin as
    zeros. Leaving it compiles them and waits for all; then the report is filled in. RuntimeError with the name of the
    first kernel that can't be compiled or loaded.

    ``threads``: compilations at once; 0: as many as the process has cores. ``processes``: many are compiled by
    processes. Where kernels are Triton's own or interpreted, they run.
    """
    report = CompileReport(place=str(knobs.cache.dir))
    if not ABLE or knobs.runtime.interpret:
        yield report
        return
    count = threads or min(MOST_THREADS, len(os.sched_getaffinity(0)))
    device = driver.active.get_current_device()
    choose = getattr(driver.active, "set_current_device", None)
    with ThreadPoolExecutor(count, initializer=choose, initargs=(device,) if choose else ()) as executor:
        pool = Pool(executor, device, count, processes)
        token = COLLECTING.set(pool)
        try:
            with Zeros():
                yield report
        except BaseException:
            executor.shutdown(cancel_futures=True)
            pool.leave()
            raise
        finally:
            COLLECTING.reset(token)
        failed = pool.finish(report)
    for name, error in failed:
        raise RuntimeError(f"kernel {name}: {type(error).__name__}: {error}") from error


@dataclass(slots=True)
class KernelCompiler:
    """The contract's ``Compiler``. What every look into Triton's cache needs and takes tenths of a second (a digest of
    Triton's own files, the assembler's version, Triton's own code for the device) is found beside other work, from
    the moment that this is made."""

    threads: int = 0
    processes: bool = True
    ahead: Thread | None = None

    def __post_init__(self) -> None:
        self.ahead = Thread(target=prepare, name="kernel cache", daemon=True)
        self.ahead.start()

    def compiling(self) -> Any:
        """See ``compiling``."""
        if self.ahead is not None:
            self.ahead.join()
            self.ahead = None
        return compiling(self.threads, processes=self.processes)


def prepare() -> None:
    """Have ready what the first compilation, or the first look for a compiled kernel, would wait for."""
    try:
        triton_key()
        if ABLE and not knobs.runtime.interpret:
            make_backend(driver.active.get_current_target()).hash()
            _ = driver.active.utils
    except Exception as error:  # whoever needs it meets the reason
        logger.debug("not prepared", exc_info=error)

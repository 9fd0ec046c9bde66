"""Compiles ``src`` into ``drivetrain_cpu/_kernels.so`` when the wheel is built, also for an editable install.

No torch, no Python headers: the library has a C interface. Without a compiler the wheel is a pure one, its linears
run on torch's own kernels, and ``engine explain`` says why. ``DRIVETRAIN_CPU_KERNELS``: ``off`` builds none,
``require`` makes a failure an error. ``CXX`` names the compiler, with its first options if need be.
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

LIBRARY = "drivetrain_cpu/_kernels.so"
COMMON = ("-std=gnu++20", "-O3", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra")
X86_LEVELS = {
    "level_avx2.cpp": ("-mavx2", "-mfma"),
    "level_avx512.cpp": ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mprefer-vector-width=512"),
}
COMPILERS = ("g++", "c++", "clang++")
SOURCES = ("door.cpp", "pool.cpp", "prepare.cpp", "level_plain.cpp")


class KernelHook(BuildHookInterface):
    """Adds the compiled library to a wheel."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile; a wheel with a library is one for this platform only."""
        wanted = os.environ.get("DRIVETRAIN_CPU_KERNELS", "auto")
        library = Path(self.root) / LIBRARY
        problem = "off, as asked" if wanted == "off" else compile_library(Path(self.root) / "src", library)
        if problem:
            library.unlink(missing_ok=True)
            if wanted == "require":
                raise RuntimeError(f"the kernels were not built: {problem}")
            self.app.display_warning(f"drivetrain-cpu is built without its own kernels: {problem}")
            return
        build_data["artifacts"].append(LIBRARY)
        build_data["pure_python"] = False
        build_data["tag"] = "py3-none-" + sysconfig.get_platform().replace("-", "_").replace(".", "_")


def compile_library(source: Path, library: Path) -> str:
    """Compile and link. Returns what went wrong, or nothing."""
    compiler = shlex.split(os.environ.get("CXX", "")) or [c for c in COMPILERS if shutil.which(c)][:1]
    if not compiler:
        return f"no C++ compiler was found ({', '.join(COMPILERS)}, or CXX)"
    levels = X86_LEVELS if platform.machine().lower() in ("x86_64", "amd64") else {}
    with tempfile.TemporaryDirectory() as folder:
        objects = []
        # In this order: of an inline function that several objects hold the linker takes the first, which must not
        # be one with a level's instructions.
        for name, flags in {**dict.fromkeys(SOURCES, ()), **levels}.items():
            objects.append(str(Path(folder) / f"{name}.o"))
            problem = _run(*compiler, *COMMON, *flags, "-c", str(source / name), "-o", objects[-1])
            if problem:
                return problem
        made = Path(folder) / library.name
        for linking in link_flags(source):
            problem = _run(*compiler, "-shared", *objects, *linking, "-pthread", "-o", str(made))
            if not problem:
                break
        else:
            return problem
        # A new file: a running engine keeps the one that it has mapped.
        staged = library.with_suffix(".new")
        shutil.copyfile(made, staged)
        staged.replace(library)
    return ""


def link_flags(source: Path) -> tuple[tuple[str, ...], ...]:
    """What to link with, best first: the C++ runtime inside the library, or the system's where only that is there."""
    if platform.system() != "Linux":
        return ((),)
    own = f"-Wl,--version-script={source / 'exports.map'}"
    return (own, "-static-libstdc++", "-static-libgcc"), (own,)


def _run(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        return f"{command[0]}: {error}"
    return "" if done.returncode == 0 else f"{' '.join(command)}\n{done.stderr.strip()}"

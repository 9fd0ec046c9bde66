"""Really built and really installed test wheels, in virtual environments that hold nothing else of ours."""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
import textwrap
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# What the engine needs to choose a device; no torch among it, so loading torch early would fail these tests.
NEEDED = ("pluggy", "packaging", "msgspec", "numpy", "psutil", "yaml", "_yaml", "numpy.libs")
METADATA = ("pluggy", "packaging", "msgspec", "numpy", "psutil", "pyyaml")

BACKEND = """
from drivetrain_api.v1 import BackendInfo, DeviceRecord, OptionSpec, Unavailable, hookimpl

class Plugin:
    @hookimpl
    def backend_info(self):
        return BackendInfo(name="{name}", vendor="Test", wheel="{wheel}", api="{api}", torch_device_type="cpu",
                           emulated={emulated},
                           options=(OptionSpec(key="speed", kind="int", help="how fast", default=3),))
    @hookimpl
    def environment(self, devices, view):
        return {environment}
    @hookimpl
    def probe(self):
        {probe}
    @hookimpl
    def create(self, devices, view):
        raise RuntimeError("opened " + str(tuple(devices)) + " " + str(dict(view.options)))

plugin = Plugin()
"""


@dataclass(frozen=True, kw_only=True)
class TestWheel:
    """One backend wheel to be built. ``prelude`` runs at import; ``probe`` is the hook's body."""

    __test__ = False

    name: str
    wheel: str
    entries: tuple[str, ...] = ()
    requires: tuple[str, ...] = ("drivetrain-api>=0.1,<0.2",)
    prelude: str = ""
    probe: str = 'return [DeviceRecord(index=0, name="one"), DeviceRecord(index=1, name="two")]'
    environment: dict[str, str] = field(default_factory=dict)
    emulated: bool = False

    @property
    def module(self) -> str:
        return self.wheel.replace("-", "_")

    def build(self, directory: Path) -> Path:
        """Write the project and build its wheel."""
        source = directory / f"src-{self.wheel}"
        (source / self.module).mkdir(parents=True)
        body = BACKEND.format(
            name=self.name,
            wheel=self.wheel,
            api=self.requires[0].removeprefix("drivetrain-api") if self.requires else "",
            environment=self.environment,
            probe=self.probe,
            emulated=self.emulated,
        )
        (source / self.module / "__init__.py").write_text(self.prelude + body)
        entries = self.entries or (self.name,)
        (source / "pyproject.toml").write_text(
            textwrap.dedent(f"""
            [build-system]
            requires = ["hatchling"]
            build-backend = "hatchling.build"
            [project]
            name = "{self.wheel}"
            version = "1.2.3"
            dependencies = {json.dumps(list(self.requires))}
            [project.entry-points."drivetrain.backends"]
            """)
            + "\n".join(f'{entry} = "{self.module}:plugin"' for entry in entries)
            + f'\n[tool.hatch.build.targets.wheel]\npackages = ["{self.module}"]\n'
        )
        return build_wheel(source, directory / "wheels")


def build_wheel(source: Path, target: Path) -> Path:
    """Build one project's wheel with its own build backend; returns its path."""
    target.mkdir(exist_ok=True, parents=True)
    before = set(target.glob("*.whl"))
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(target)],
        cwd=source,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = set(target.glob("*.whl")) - before
    return wheel


@dataclass(frozen=True)
class CleanVenv:
    """A virtual environment with the engine's and the contract's wheels, and what was installed since."""

    path: Path

    @property
    def python(self) -> Path:
        return self.path / "bin" / "python"

    @property
    def site(self) -> Path:
        return self.path / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"

    def install(self, *wheels: Path) -> None:
        """Install built wheels by pip, without the index."""
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--no-compile", "--target"]
        done = subprocess.run([*command, str(self.site), *map(str, wheels)], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr

    def run(
        self, *words: str, environment: dict[str, str] | None = None, timeout: float = 60
    ) -> subprocess.CompletedProcess[str]:
        """Run the engine's command line there."""
        return subprocess.run(
            [str(self.python), "-m", "drivetrain.cli.main", *words],
            capture_output=True,
            text=True,
            timeout=timeout,
            env={"PATH": "/usr/bin:/bin", "HOME": str(self.path), **(environment or {})},
        )

    def code(self, text: str, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        """Run Python code there."""
        return subprocess.run(
            [str(self.python), "-c", textwrap.dedent(text)],
            capture_output=True,
            text=True,
            timeout=60,
            env={"PATH": "/usr/bin:/bin", "HOME": str(self.path), **(environment or {})},
        )


def make_venv(path: Path, like: CleanVenv | None = None) -> CleanVenv:
    """Make a virtual environment with, linked from here, the third-party packages that choosing a device needs;
    with ``like``, also all that was installed there."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(path)], check=True)
    venv = CleanVenv(path)
    here = Path(sysconfig.get_path("purelib"))
    found = [here / name for name in NEEDED if (here / name).exists()]
    found += [info for name in METADATA for info in here.glob(f"{name}-*.dist-info")]
    for source in list(like.site.iterdir()) if like else found:
        (venv.site / source.name).symlink_to(source)
    return venv

"""Where a model comes from: a directory, a GGUF file, or a hub id that the local hub cache holds. Torch-free.

The network is never touched.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from drivetrain.config import hub_cache
from drivetrain.errors import ModelError

if TYPE_CHECKING:
    from drivetrain.models.weights.checkpoint import Checkpoint
    from drivetrain.models.weights.gguf_file import GgufFile

Kind = Literal["safetensors", "gguf"]
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """A model that was found. ``config`` is Hugging Face style; ``identity`` names weights and revision in hashes.

    ``generation``: generation_config.json's content, where there is one. ``header``: a GGUF file's, read once for
    configuration, weights and tokenizer.
    """

    kind: Kind
    path: Path
    config: Mapping[str, Any]
    identity: str
    generation: Mapping[str, Any] = field(default_factory=dict)
    header: GgufFile | None = field(default=None, repr=False, compare=False)

    def open_checkpoint(self) -> Checkpoint:
        """Open the weights (loads torch's readers). WeightsError when they are damaged or absent."""
        if self.kind == "gguf":
            from drivetrain.models.weights.gguf_checkpoint import GgufCheckpoint

            assert self.header is not None, "a GGUF source has its header"
            self.header.reopen()
            return GgufCheckpoint(self.header)
        from drivetrain.models.weights.safetensors_files import SafetensorsCheckpoint

        return SafetensorsCheckpoint(self.path)

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """End tokens: the generation config's, else the model's; empty where neither names one. ModelError for what is
        no token id."""
        found = self.generation.get("eos_token_id", self.config.get("eos_token_id"))
        if found is None:
            return ()
        ids = tuple(found) if isinstance(found, list | tuple) else (found,)
        if not all(type(one) is int and one >= 0 for one in ids):
            raise ModelError(f"{self.path}: eos_token_id is {found!r}", fix="it must be a token id or a list of them")
        return ids


def resolve(model: str, revision: str | None = None) -> ModelSource:
    """Find a model. ModelError naming what was looked for, where, and the way out."""
    path = Path(model).expanduser()
    if path.is_dir():
        return _directory(path, revision)
    if path.suffix in PICKLES:
        raise ModelError(f"{model} is a pickle, which can run code when loaded", fix="use safetensors or GGUF")
    if path.is_file():
        return _file(path)
    if path.suffix == ".gguf" or model.startswith(("/", "./", "../", "~")) or model.count("/") > 1:
        near = _nearest(path)
        hint = f"did you mean {near}?" if near else "check the path"
        raise ModelError(f"{model} does not exist", fix=hint)
    return _hub(model, revision)


def _nearest(path: Path) -> str:
    if not path.parent.is_dir():
        return ""
    near = difflib.get_close_matches(path.name, [p.name for p in path.parent.iterdir()], 1)
    return str(path.parent / near[0]) if near else ""


def _file(path: Path) -> ModelSource:
    with open(path, "rb") as file:
        magic = file.read(4)
    if magic != b"GGUF":
        hint = (
            f"give its directory: {path.parent}" if path.suffix == ".safetensors" else "give a directory or a GGUF file"
        )
        raise ModelError(f"{path} is a file but not GGUF", fix=hint)
    from drivetrain.models.weights.gguf_config import config_of
    from drivetrain.models.weights.gguf_file import GgufFile

    file_ = GgufFile(path)
    config = config_of(file_)
    file_.close()
    stat = path.stat()
    return ModelSource(
        kind="gguf",
        path=path,
        config=config,
        identity=f"gguf:{path.name}:{stat.st_size}:{stat.st_mtime_ns}",
        header=file_,
    )


def _directory(path: Path, revision: str | None) -> ModelSource:
    config = read_json(path / "config.json")
    if config is None:
        files = sorted(path.glob("*.gguf"))
        if len(files) == 1:
            return _file(files[0])
        hint = f"name one of its GGUF files, such as {files[0]}" if files else "give a model's directory"
        raise ModelError(f"{path} has no config.json", fix=hint)
    generation = read_json(path / "generation_config.json") or {}
    weights = sorted([*path.glob("*.safetensors"), *path.glob("*.safetensors.index.json")])
    stamp = ":".join(f"{w.name}={w.stat().st_size}.{w.stat().st_mtime_ns}" for w in weights)
    return ModelSource(
        kind="safetensors",
        path=path,
        config=config,
        generation=generation,
        identity=f"dir:{path.resolve().name}:{revision or ''}:{stamp}",
    )


def _hub(model: str, revision: str | None) -> ModelSource:
    root = hub_cache() / f"models--{model.replace('/', '--')}"
    way_out = f"fetch it first: hf download {model}, or give a local directory"
    if model.count("/") != 1 or not root.is_dir():
        raise ModelError(f"{model} is neither a path nor in the local hub cache ({hub_cache()})", fix=way_out)
    ref = root / "refs" / (revision or "main")
    commit = ref.read_text(encoding="utf-8").strip() if ref.is_file() else (revision or "")
    snapshot = root / "snapshots" / commit
    if not commit or not snapshot.is_dir():
        raise ModelError(f"the hub cache holds {model}, but not revision {revision or 'main'}", fix=way_out)
    found = _directory(snapshot, commit)
    return ModelSource(
        kind=found.kind,
        path=found.path,
        config=found.config,
        generation=found.generation,
        identity=f"hub:{model}@{commit}",
    )


def read_json(path: Path) -> dict[str, Any] | None:
    """Return a JSON object, or None when there is no such file. ModelError when it is not one."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (ValueError, OSError) as error:
        raise ModelError(f"{path} can't be read: {error}", fix="download it again") from error
    if not isinstance(data, dict):
        raise ModelError(f"{path} is not a JSON object", fix="download it again")
    return data

"""How checkpoints name parameters, and reading parameters by path."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, cast

from drivetrain.errors import ModelError, WeightsError
from drivetrain.models.spec import ModelSpec, Shape
from drivetrain.models.weights.checkpoint import Checkpoint, TensorInfo, check_tensors, repeat

if TYPE_CHECKING:
    import torch

    from drivetrain.models.weights.checkpoint import StoredCheckpoint
    from drivetrain.models.weights.feed import Run
    from drivetrain_api.v1 import DeviceRuntime


@dataclass(frozen=True, slots=True, kw_only=True)
class Naming:
    """One family's names.

    ``names``: checkpoint tensor -> the parameter paths that it holds, joined along dimension 0 (mostly one).
    ``prefixes``: (as found, as in ``names``): other ways in which checkpoints of the family begin their names.
    ``ignored``: beginnings or endings of tensors that a checkpoint may hold and the decoder has no use for.
    """

    names: Mapping[str, tuple[str, ...]]
    prefixes: tuple[tuple[str, str], ...] = ()
    ignored: tuple[str, ...] = ()

    def canonical(self, name: str) -> str:
        """The name as ``names`` has it."""
        for found, meant in self.prefixes:
            if name.startswith(found):
                return meant + name.removeprefix(found)
        bare = f"model.{name}"  # models for vectors are stored without their head, and without this beginning
        return bare if name not in self.names and bare in self.names else name


def path_naming(spec: ModelSpec) -> Naming:
    """The naming of a checkpoint whose tensors are named by their paths; for models made in tests."""
    return Naming(names={path: (path,) for path in spec.parameters()})


def named(spec: ModelSpec, table: Mapping[str, str], *, prefix: str = "model.") -> dict[str, tuple[str, ...]]:
    """Name every parameter as Hugging Face decoders do: ``table`` maps a layer's part to its name in a checkpoint.

    ``mixer.q`` -> ``self_attn.q_proj`` makes ``layers.3.mixer.q.weight`` of ``model.layers.3.self_attn.q_proj.weight``.
    ModelError for a part that the table does not have.
    """
    ends = {
        "embedding.weight": f"{prefix}embed_tokens.weight",
        "final_norm.weight": f"{prefix}norm.weight",
        "final_norm.bias": f"{prefix}norm.bias",
        "lm_head.weight": "lm_head.weight",
    }
    names: dict[str, tuple[str, ...]] = {}
    for path in spec.parameters():
        if path in ends:
            names[ends[path]] = (path,)
            continue
        _, index, rest = path.split(".", 2)
        part, dot, kind = rest.rpartition(".") if rest.endswith((".weight", ".bias")) else (rest, "", "")
        if part not in table:
            raise ModelError(f"the family of {spec.architecture} has no checkpoint name for {path}")
        names[f"{prefix}layers.{index}.{table[part]}{dot}{kind}"] = (path,)
    return names


def expected_tensors(spec: ModelSpec, naming: Naming) -> dict[str, Shape]:
    """Checkpoint tensor -> shape, of everything that the model needs."""
    shapes = spec.parameters()
    expected: dict[str, Shape] = {}
    for name, paths in naming.names.items():
        first = shapes[paths[0]]
        expected[name] = (sum(shapes[path][0] for path in paths), *first[1:])
    return expected


class CheckpointMap:
    """A checkpoint whose tensors fit the model, read by parameter path."""

    def __init__(
        self, checkpoint: Checkpoint, spec: ModelSpec, found: Mapping[str, str], names: Mapping[str, tuple[str, ...]]
    ) -> None:
        """``found``: canonical name -> name in the checkpoint."""
        self.dtype = spec.dtype
        self._checkpoint = checkpoint
        self._shapes = spec.parameters()
        self._whole = {paths: found[name] for name, paths in names.items()}
        self._parts: dict[str, tuple[str, int, int]] = {}  # path -> (stored name, first row, end row)
        for name, paths in names.items():
            row = 0
            for path in paths:
                self._parts[path] = (found[name], row, row + self._shapes[path][0])
                row += self._shapes[path][0]

    def runs(self, paths: Sequence[str]) -> list[Run]:
        """Where the parameters at ``paths`` lie, one after another. For a ``StoredCheckpoint``."""
        from drivetrain.models.weights.feed import Run

        checkpoint = cast("StoredCheckpoint", self._checkpoint)
        runs = []
        for path in paths:
            name, first, end = self._parts[path]
            row = prod(self._shapes[path][1:])
            runs.append(Run(stored=checkpoint.stored(name), first=first * row, count=(end - first) * row))
        return runs

    @property
    def in_files(self) -> bool:
        """Whether ``runs`` can be asked for."""
        return hasattr(self._checkpoint, "stored")

    def empty(self, paths: Sequence[str], dtype: torch.dtype, runtime: DeviceRuntime) -> torch.Tensor:
        """Return a device tensor for the parameters at ``paths``, joined along dimension 0."""
        rows = sum(self._shapes[path][0] for path in paths)
        return runtime.empty((rows, *self._shapes[paths[0]][1:]), dtype)

    def load(self, paths: Sequence[str], dtype: torch.dtype, runtime: DeviceRuntime) -> torch.Tensor:
        """Return the parameters at ``paths``, joined along dimension 0, on the device."""
        pattern = getattr(self._checkpoint, "pattern", None)
        if pattern is None or not all((path,) in self._whole for path in paths):
            return runtime.from_host(self.read(paths, dtype))
        joined = self.empty(paths, dtype, runtime)
        first = 0
        for path in paths:
            end = first + self._shapes[path][0]
            repeat(runtime.from_host(pattern(self._parts[path][0], dtype)), joined[first:end])
            first = end
        return joined

    def read(self, paths: Sequence[str], dtype: torch.dtype) -> torch.Tensor:
        """Return the parameters at ``paths``, joined along dimension 0, on the host."""
        import torch

        whole = self._whole.get(tuple(paths))
        if whole is not None:
            return self._checkpoint.read(whole, dtype)
        parts = []
        for path in paths:
            name, first, end = self._parts[path]
            parts.append(self._checkpoint.read(name, dtype)[first:end])
        return torch.cat(parts)


def map_checkpoint(spec: ModelSpec, naming: Naming, checkpoint: Checkpoint) -> CheckpointMap:
    """Match a checkpoint's names and shapes with the model's. One WeightsError names all that does not fit."""
    infos: dict[str, TensorInfo] = {}
    found: dict[str, str] = {}
    for name, info in checkpoint.infos().items():
        canonical = naming.canonical(name)
        if canonical in found:
            raise WeightsError(
                f"the checkpoint holds {canonical} twice, as {found[canonical]} and as {name}",
                fix="remove one of them",
            )
        infos[canonical], found[canonical] = info, name
    ignored = {name for name in infos if _matches(name, naming.ignored)}
    if spec.tied:
        ignored.add("lm_head.weight")
    check_tensors(expected_tensors(spec, naming), infos, frozenset(ignored))
    if spec.tied and "lm_head.weight" in found:
        _check_tied(spec, naming, checkpoint, found)
    return CheckpointMap(checkpoint, spec, found, naming.names)


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(name.startswith(p) or name.endswith(p) for p in patterns)


def _check_tied(spec: ModelSpec, naming: Naming, checkpoint: Checkpoint, found: Mapping[str, str]) -> None:
    """A tied model whose checkpoint has a head of its own: fine when it is the embedding again, else an error."""
    import torch

    from drivetrain_api.v1 import torch_dtype

    dtype = torch_dtype(spec.dtype)
    (embedding,) = (name for name, paths in naming.names.items() if paths == ("embedding.weight",))
    head = checkpoint.read(found["lm_head.weight"], dtype)
    if not torch.equal(head, checkpoint.read(found[embedding], dtype)):
        raise WeightsError(
            "the configuration ties the head to the embedding (tie_word_embeddings), but the checkpoint's "
            f"{found['lm_head.weight']} differs from {found[embedding]}",
            fix="set tie_word_embeddings to false in config.json, or remove that tensor",
        )

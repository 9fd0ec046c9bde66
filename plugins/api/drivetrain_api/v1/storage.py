"""Storage: caches as opaque handles. The core counts blocks and slots; only the backend knows where bytes lie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch

CacheKind = Literal["full", "window", "latent", "compressed", "circular", "recurrent", "token_history", "cross"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CachePart:
    """One tensor kept for every slot: ``shape`` a slot, dtype as torch's name. K and V are two parts."""

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSpec:
    """What one layer keeps between steps. Layers of equal specs form a group and share block ids.

    For paged kinds a slot is one token and a block holds ``block_tokens`` slots. For ``recurrent`` a block holds one
    slot: the whole state of a request, or a checkpoint of it. ``window``: how many latest tokens are ever read,
    counting the query's own (None: all of them). ``checkpoint_alignment``: offsets inside a chunk at which a
    recurrent layer can export its state are multiples of it.
    """

    kind: CacheKind
    parts: tuple[CachePart, ...]
    window: int | None = None
    checkpoint_alignment: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheLayout:
    """How a backend stores one layer of one spec.

    ``bytes_per_block``: one layer, padding and scales included. ``strided``: blocks may lie ``block_stride`` bytes
    apart inside a slab of a shared pool; where False (opaque), each layer gets an arena of its own by ``allocate``.
    ``slot_dtype``: torch's name of the integer type of slots and block tables.
    """

    spec: CacheSpec
    block_tokens: int
    bytes_per_block: int
    alignment: int
    strided: bool
    slot_dtype: str = "int64"


class SlabPool(Protocol):
    """One run of bytes on the device, cut into blocks by the core."""

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""


class CacheHandle(Protocol):
    """The cache of one layer. ``slot`` = block id * slots a block + offset. Block 0 is the null block: padded
    tokens write there and nothing reads it."""

    @property
    def layout(self) -> CacheLayout:
        """How it is stored."""

    @property
    def num_blocks(self) -> int:
        """Block ids are 0 .. num_blocks - 1."""

    @property
    def nbytes(self) -> int:
        """Device bytes held, shared slabs not counted."""

    def read(self, slots: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return every part at ``slots`` [n] as dense tensors [n, *part.shape] of the part's dtype."""

    def write(self, slots: torch.Tensor, values: Sequence[torch.Tensor]) -> None:
        """Store one tensor [n, *part.shape] a part at ``slots`` [n]. Slots are distinct outside block 0."""

    def copy_blocks(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy whole blocks, ids [n] to ids [n], ordered on the stream."""

    def zero_blocks(self, blocks: torch.Tensor) -> None:
        """Fill blocks, ids [n], with zeros."""

    def export_blocks(self, blocks: torch.Tensor) -> torch.Tensor:
        """Return whole blocks, ids [n], as device bytes uint8 [n, bytes_per_block]; for swap and transfer."""

    def import_blocks(self, blocks: torch.Tensor, data: torch.Tensor) -> None:
        """Store what ``export_blocks`` of an equal layout returned."""


@runtime_checkable
class BlockRecycler(Protocol):
    """Optional, beside ``CacheHandle``: told of blocks whose content is void. Nothing reads them before they are
    written anew, so that a handle may fill them with what makes a stray read show."""

    def freed(self, blocks: torch.Tensor) -> None:
        """Learn that blocks, ids [n], are void. Ordered on the stream: after all that used them, before anything that
        reuses them. Block 0 may be among them, more than once: it fills lists up where shapes are fixed."""


@runtime_checkable
class Shrinkable(Protocol):
    """Optional, beside ``SlabPool`` and ``CacheHandle``: memory of its last blocks can go back to the device, while
    the others stay where they are, for graphs that hold their addresses."""

    @property
    def piece_bytes(self) -> int:
        """What goes back ends at multiples of this, at least within the last 32nd."""

    def shrink(self, nbytes: int) -> int:
        """Give back what lies behind the first ``nbytes``: of a pool as they lie, of a handle the blocks that these do
        not hold. Returns the bytes that went back. All work that touches them is done, and none comes any more."""


class Storage(Protocol):
    """Makes caches. ``drivetrain_api.v1.torch_storage`` composes one of strided torch tensors."""

    @property
    def block_tokens(self) -> tuple[int, ...]:
        """Block sizes that are supported, the preferred one first."""

    def layout(self, spec: CacheSpec, block_tokens: int) -> CacheLayout:
        """Say how a layer of that spec would be stored. ValueError for a dtype or block size not supported."""

    def allocate_pool(self, num_bytes: int) -> SlabPool:
        """Allocate the shared pool. Only called where every layout is strided."""

    def view(self, pool: SlabPool, layout: CacheLayout, block_stride: int, offset: int) -> CacheHandle:
        """Bind one layer inside the pool: its block i begins at byte i * block_stride + offset."""

    def allocate(self, layout: CacheLayout, num_blocks: int) -> CacheHandle:
        """Allocate an arena for one layer."""

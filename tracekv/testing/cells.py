"""A cell of the kit's matrix: an engine, a short story of requests, and what must have happened for it to tell anything.

Everything is data, so that a cell can be played with a connector, without one, on two ranks, or be told in words.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

#: Token ids of the kit's models.
VOCABULARY = 512


@dataclass(frozen=True, kw_only=True)
class Ask:
    """A request of a story.

    Attributes:
        pieces: ``(seed, tokens)`` one after the other; equal pieces at the same place are equal tokens.
        new: Tokens to generate.
        salt: ``cache_salt``.
        lora: ``lora_task_id``.
        image: Seed of an image at the prompt's start.
        has_hashes: The image comes with its hashes; without them its KV has no key.
        is_dummy: What the runtime pads and warms up with: the connector isn't asked for it.
        stops: It ends with its first token, whichever that is: in the overlap loop that is found out late.
        serving: ``some``: the story says nothing unless the connector serves tokens here; ``none``: it must not.
    """

    pieces: tuple[tuple[int, int], ...]
    new: int = 3
    salt: str | None = None
    lora: int | None = None
    image: int | None = None
    has_hashes: bool = True
    is_dummy: bool = False
    stops: bool = False
    serving: Literal["any", "some", "none"] = "any"

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt."""
        return sum(count for _, count in self.pieces)

    def tokens(self, namespace: str) -> list[int]:
        """The prompt; cells have namespaces of their own, so what one stores is no hit in another."""
        found: list[int] = []
        for seed, count in self.pieces:
            found += random.Random(f"{namespace} {seed}").choices(range(VOCABULARY), k=count)  # noqa: S311  # no secret
        return found

    def options(self) -> dict[str, Any]:
        """Further arguments of :meth:`tracekv.harness.Executor.submit`."""
        options: dict[str, Any] = {}
        if self.salt is not None:
            options["cache_salt"] = self.salt
        if self.lora is not None:
            options["lora_task_id"] = self.lora
        if self.image is not None:
            options["multimodal_positions"], options["multimodal_lengths"] = [1], [4]
            if self.has_hashes:
                digest = hashlib.sha256(f"image {self.image}".encode()).digest()
                options["multimodal_hashes"] = [[int.from_bytes(digest[i : i + 4], "big") for i in range(0, 32, 4)]]
        if self.is_dummy:
            options["is_dummy"] = True
        if self.stops:
            options["stop_tokens"] = list(range(VOCABULARY))
        return options

    def told(self, block: int) -> str:
        """In the field's words."""
        parts = [
            f"{self.prompt_tokens} tokens ({'+'.join(f'{n} of {seed}' for seed, n in self.pieces)}; block {block})"
        ]
        parts += [f"{name} {value}" for name, value in (("salt", self.salt), ("LoRA", self.lora)) if value is not None]
        if self.image is not None:
            parts.append(f"image {self.image}" + ("" if self.has_hashes else " without hashes"))
        parts += ["a dummy"] * self.is_dummy
        return f"{', '.join(parts)}, {'stops with its first token' if self.stops else f'{self.new} to generate'}"


class Submit(NamedTuple):
    """Queue a request."""

    ask: Ask


class Run(NamedTuple):
    """Run passes until nothing is left to do."""


class Step(NamedTuple):
    """Run some passes, idle ones included."""

    passes: int = 1


class Cancel(NamedTuple):
    """Cancel the request that was submitted so-and-so-manieth, from 0."""

    which: int


class Destroy(NamedTuple):
    """Take the pages of the request that was submitted so-and-so-manieth: it begins anew. ``forget``: on the device too."""

    which: int
    forget: bool = True


class NewEngine(NamedTuple):
    """End the engine and start another: its device is empty."""


Move = Submit | Run | Step | Cancel | Destroy | NewEngine


def told(moves: tuple[Move, ...], block: int) -> list[str]:
    """A story line by line."""
    lines, asked = [], 0
    for move in moves:
        if isinstance(move, Submit):
            lines.append(f"request {asked + 1} is queued: {move.ask.told(block)}")
            asked += 1
        elif isinstance(move, Step):
            lines.append(f"{move.passes} pass{'es' if move.passes > 1 else ''}")
        elif isinstance(move, Cancel):
            lines.append(f"request {move.which + 1} is cancelled")
        elif isinstance(move, Destroy):
            where = "; the device forgets its blocks" if move.forget else ""
            lines.append(f"request {move.which + 1} loses its pages and begins anew{where}")
        elif isinstance(move, NewEngine):
            lines.append("the engine ends; another starts, its device empty")
        else:
            lines.append("passes until nothing is left to do")
    return lines


Reached = Literal["served", "parked", "unaligned", "partial", "replayed", "chunked"]


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One cell.

    Attributes:
        name: ``cache/story``, or ``cache/ranks2/story``.
        what: One line.
        moves: The story.
        mode: The cache manager.
        groups: Layer groups of the model: one (full attention), or two (a window, and full).
        ranks: Tensor-parallel ranks.
        options: Arguments of :class:`tracekv.harness.Executor`.
        needs: Parameters and methods of the executor without which the cell can't run.
        reached: What must have happened: without it the story says nothing about the connector.
    """

    name: str
    what: str
    moves: tuple[Move, ...]
    mode: Literal["v1", "v2"] = "v2"
    groups: int = 1
    ranks: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    reached: frozenset[Reached] = frozenset()

    @property
    def preset(self) -> str:
        """Which of the harness's models."""
        return "llama" if self.groups == 1 else "gemma3"

    @property
    def is_dealt_out(self) -> bool:
        """Attention data parallelism: each rank has requests of its own, dealt out in turn."""
        return bool(self.options.get("attention_dp"))

    @property
    def story(self) -> str:
        """The name without the cache."""
        return self.name.rpartition("/")[2]

    def on_two_ranks(self) -> Cell:
        """The same on two ranks."""
        cache, _, story = self.name.partition("/")
        return replace(self, name=f"{cache}/ranks2/{story}", ranks=2)

"""The default matrix: what every connector pair is put through. Prompts are short, so the whole of it takes a minute or two."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator
from typing import Any, Literal

from tracekv.testing.cells import Ask, Cancel, Cell, Destroy, Move, NewEngine, Reached, Run, Step, Submit

#: ``name -> (mode, layer groups)``.
CACHES: dict[str, tuple[Literal["v1", "v2"], int]] = {"v1": ("v1", 1), "v2": ("v2", 1), "v2-groups2": ("v2", 2)}
_ON_TWO_RANKS = ("warm", "chunked", "parked", "together", "overlap", "cancel-decode", "overlap-cancel-parked")
SERVED: frozenset[Reached] = frozenset({"served"})


def serve(*asks: Ask) -> tuple[Move, ...]:
    """Submit together and run."""
    return (*(Submit(ask) for ask in asks), Run())


def matrix(block: int = 16, cells: str = "*") -> list[Cell]:
    """The cells whose name matches the glob ``cells``; prompts are made of blocks of ``block`` tokens."""
    stories = list(_Stories(block).all())
    found = []
    for cache, (mode, groups) in CACHES.items():
        for story in stories:
            if story.pop_mode not in (None, mode):
                continue
            cell = Cell(name=f"{cache}/{story.name}", mode=mode, groups=groups, **story.rest)
            found.append(cell)
            if cell.is_dealt_out:
                found[-1] = cell.on_two_ranks()
            elif story.name in _ON_TWO_RANKS:
                found.append(cell.on_two_ranks())
    return [cell for cell in found if fnmatch.fnmatchcase(cell.name, cells)]


class _Story:
    """A cell of any cache."""

    def __init__(
        self, name: str, what: str, *moves: tuple[Move, ...] | Move, mode: str | None = None, **rest: Any
    ) -> None:
        flat: list[Move] = []
        for move in moves:
            # A move is a tuple too, but a named one.
            flat += [move] if hasattr(move, "_fields") else move  # type: ignore[list-item]
        self.name = name
        self.pop_mode = mode
        self.rest: dict[str, Any] = {"what": what, "moves": tuple(flat), **rest}


class _Stories:
    def __init__(self, block: int) -> None:
        self.block = block

    def ask(self, *pieces: tuple[int, float, int] | tuple[int, float], **more: Any) -> Ask:
        """Pieces are ``(seed, blocks)`` or ``(seed, blocks, further tokens)``."""
        sizes = [(piece[0], round(piece[1] * self.block) + (piece[2] if len(piece) > 2 else 0)) for piece in pieces]
        return Ask(pieces=tuple(sizes), **more)

    def all(self) -> Iterator[_Story]:
        yield from self.prompts()
        yield from self.device()
        yield from self.passes()
        yield from self.tenants()

    def prompts(self) -> Iterator[_Story]:
        ask, new = self.ask, NewEngine()
        yield _Story(
            "warm", "a prompt computed by one engine and served to another; then one that shares its beginning",
            serve(ask((1, 5, 7))), new, serve(ask((1, 5, 7), serving="some")), serve(ask((1, 3), (2, 2, 1))),
            reached=SERVED,
        )  # fmt: skip
        yield _Story(
            "together", "three prompts at once, and again in another order",
            serve(ask((1, 3, 2)), ask((2, 4, 1)), ask((3, 2, 9))), new,
            serve(ask((3, 2, 9)), ask((1, 3, 2)), ask((2, 4, 1))), reached=SERVED,
        )  # fmt: skip
        yield _Story(
            "chunked", "a prompt in chunks of two blocks",
            serve(ask((1, 7, 3))), new, serve(ask((1, 7, 3))), serve(ask((1, 7, 3), (2, 3))),
            options={"chunk_tokens": 2 * self.block}, reached=frozenset({"chunked"}),
        )  # fmt: skip
        yield _Story(
            "whole-blocks", "a prompt of exactly four blocks: a token has to be left to compute",
            serve(ask((1, 4))), new, serve(ask((1, 4), serving="some")), reached=SERVED,
        )  # fmt: skip
        yield _Story(
            "short", "prompts shorter than a block, of one token, and of a block and a token",
            serve(ask((1, 0, 1)), ask((2, 0.5)), ask((3, 1, 1))), new,
            serve(ask((1, 0, 1)), ask((2, 0.5)), ask((3, 1, 1))),
        )  # fmt: skip
        yield _Story(
            "long-output", "generation over three blocks, past what the prompt holds",
            serve(ask((1, 2, 3), new=3 * self.block)), new, serve(ask((1, 2, 3), new=3 * self.block)), reached=SERVED,
        )  # fmt: skip
        yield _Story(
            "prefix", "known blocks behind another beginning: a key has to cover everything before its block",
            serve(ask((8, 1), (5, 2, 1)), ask((9, 1), (1, 2, 1))), new, serve(ask((8, 1), (1, 2, 1))),
        )  # fmt: skip

    def device(self) -> Iterator[_Story]:
        ask, new = self.ask, NewEngine()
        yield _Story(
            "device-reuse", "the device has the first two blocks, the connector those behind them",
            serve(ask((1, 6, 3))), new, serve(ask((1, 2), (2, 1, 3))), serve(ask((1, 6, 3), serving="some")),
            serve(ask((1, 6, 3))), reached=SERVED,
        )  # fmt: skip
        yield _Story(
            "partial-reuse", "the device has two blocks and a half: computed tokens are no multiple of the block",
            serve(ask((1, 6, 3))), new, serve(ask((1, 2.5), (2, 2))), serve(ask((1, 6, 3))),
            mode="v2", options={"partial_reuse": True}, reached=frozenset({"unaligned"}),
        )  # fmt: skip
        few = 12
        yield _Story(
            "few-pages", "pages change hands often",
            *(serve(ask((seed, 5, 2)), ask((seed + 10, 4, 5))) for seed in (1, 2, 3, 1, 2)),
            options={"num_blocks": few}, reached=SERVED,
        )  # fmt: skip

    def passes(self) -> Iterator[_Story]:
        ask, new = self.ask, NewEngine()
        yield _Story(
            "idle", "idle passes before, between and after requests",
            Step(3), serve(ask((1, 4, 2))), Step(3), new, Step(2), serve(ask((1, 4, 2), serving="some")), Step(3),
            reached=SERVED,
        )  # fmt: skip
        yield _Story(
            "staggered", "a request comes while another generates",
            serve(ask((1, 4, 2)), ask((2, 3, 2))), new,
            Submit(ask((1, 4, 2), new=8)), Step(3), serve(ask((2, 3, 2), new=6)), reached=SERVED,
        )  # fmt: skip
        yield _Story(
            "parked", "loads while the request is parked: get_finished is the only callback that comes",
            serve(ask((1, 5, 7))), new, serve(ask((1, 5, 7), serving="some")),
            serve(ask((1, 5, 7), (2, 2)), ask((3, 3, 1))), Step(2), reached=frozenset({"parked"}),
        )  # fmt: skip
        yield _Story(
            "graph-replay", "passes that only generate call no per-layer hook",
            serve(ask((1, 4, 2), new=self.block)), new, serve(ask((1, 4, 2), new=self.block)),
            options={"graph_replay": True}, reached=SERVED,
        )  # fmt: skip
        yield _Story(
            "dummies", "requests that the runtime pads with, beside real ones: never asked for, never stored",
            serve(ask((1, 4, 2)), ask((2, 3, 2), is_dummy=True)), new,
            serve(ask((1, 4, 2)), ask((2, 3, 2), is_dummy=True)), serve(ask((2, 3, 2), serving="none")), reached=SERVED,
        )  # fmt: skip
        yield _Story(
            "partial", "there are pages for a part of what is offered",
            serve(ask((1, 7, 3))), new, serve(ask((1, 7, 3), serving="some")), mode="v2",
            options={"chunk_tokens": 2 * self.block, "grow_limit": 1}, reached=frozenset({"partial", "served"}),
        )  # fmt: skip
        yield _Story(
            "unhonoured", "there are pages for nothing of what is offered",
            serve(ask((1, 7, 3))), new, serve(ask((1, 7, 3))), mode="v2",
            options={"chunk_tokens": self.block, "grow_limit": 0}, reached=frozenset({"partial"}),
        )  # fmt: skip
        yield _Story(
            "evicted", "MAX_UTILIZATION: two requests outgrow the pages, and the newer one begins anew",
            serve(ask((1, 4, 2), new=3 * self.block), ask((2, 4, 2), new=3 * self.block)), new,
            serve(ask((2, 4, 2), serving="some"), ask((1, 4, 2))), mode="v2",
            options={"policy": "MAX_UTILIZATION", "num_blocks": 12}, reached=frozenset({"replayed", "served"}),
        )  # fmt: skip
        yield _Story(
            "attention-dp", "every rank has a scheduler and requests of its own, and runs a forward whenever the other does",
            serve(ask((1, 4, 2)), ask((2, 3, 1)), ask((3, 2, 5), new=6)), new,
            serve(ask((1, 4, 2), serving="some"), ask((2, 3, 1), serving="some"), ask((3, 2, 5), new=6)), serve(ask((1, 4, 2))),
            mode="v2", options={"attention_dp": True}, reached=SERVED,
        )  # fmt: skip
        yield _Story(
            "attention-dp-parked", "each rank's prompt takes all of its pages: while it is loaded there is none to pad a pass with",
            serve(ask((1, 4, 2)), ask((2, 4, 3))), new, serve(ask((1, 4, 2)), ask((2, 4, 3))),
            mode="v2", options={"attention_dp": True, "num_blocks": 5}, reached=frozenset({"parked"}),
        )  # fmt: skip
        yield _Story(
            "attention-dp-cancel-parked", "a request is cancelled while its rank loads it: its pages stay until the load is done",
            serve(ask((1, 5, 2)), ask((2, 5, 1))), new, Submit(ask((3, 2, 1), new=8)), Submit(ask((2, 5, 1))), Step(1), Cancel(3),
            Run(), serve(ask((1, 5, 2)), ask((2, 5, 1))),
            mode="v2", options={"attention_dp": True}, reached=frozenset({"parked"}),
        )  # fmt: skip
        for loop in ("", "overlap-"):
            options = {"overlap": True} if loop else {}
            yield from self.ends(loop, options)

    def ends(self, loop: str, options: dict[str, Any]) -> Iterator[_Story]:
        """How requests end or begin anew, in either loop."""
        ask, new = self.ask, NewEngine()
        if loop:
            yield _Story(
                "overlap", "the overlap loop: finishes come a pass late",
                serve(ask((1, 4, 2)), ask((2, 3, 5), new=6)), new, serve(ask((1, 4, 2)), ask((2, 3, 5), new=6)),
                options=options, reached=SERVED,
            )  # fmt: skip
            yield _Story(
                "overlap-stop", "a stop that is found out late: request_finished comes twice, or with empty lists",
                serve(ask((1, 4, 2), stops=True), ask((2, 3, 5), new=6)), new, serve(ask((1, 4, 2), stops=True)),
                options=options, reached=SERVED,
            )  # fmt: skip
            yield _Story(
                "overlap-parked", "parked loads in the overlap loop",
                serve(ask((1, 5, 7))), new, serve(ask((1, 5, 7), serving="some"), ask((3, 3, 1))),
                options=options, reached=frozenset({"parked"}),
            )  # fmt: skip
        for name, what, before in (
            ("waiting", "a request is cancelled before its first pass", ()),
            ("prefill", "a request is cancelled between two chunks", (Step(2),)),
            ("decode", "a request is cancelled while it generates", (Step(6),)),
        ):
            yield _Story(
                f"{loop}cancel-{name}", what,
                Submit(ask((1, 5, 2), new=12)), *before, Cancel(0), Step(2), serve(ask((2, 4, 1))), new,
                serve(ask((1, 5, 2))), serve(ask((2, 4, 1))),
                options={"chunk_tokens": 2 * self.block, **options},
            )  # fmt: skip
        yield _Story(
            f"{loop}cancel-parked", "a request is cancelled while it is loaded: its pages may go at once",
            serve(ask((1, 5, 2))), new, Submit(ask((2, 2, 1), new=8)), Submit(ask((1, 5, 2))), Step(1), Cancel(2),
            Run(), serve(ask((1, 5, 2))), options=options, reached=frozenset({"parked"}),
        )  # fmt: skip
        for name, what, passes in (
            ("prefill", "an allocation is destroyed between two chunks, and the request begins anew", 2),
            ("decode", "an allocation is destroyed while the request generates, and it begins anew", 8),
        ):
            yield _Story(
                f"{loop}replay-{name}", what,
                Submit(ask((1, 5, 2), new=12)), Step(passes), Destroy(0), Run(), new, serve(ask((1, 5, 2), new=12)),
                mode="v2", options={"chunk_tokens": 2 * self.block, **options}, reached=frozenset({"replayed"}),
            )  # fmt: skip

    def tenants(self) -> Iterator[_Story]:
        ask, new = self.ask, NewEngine()
        for name, what, field, mine, others in (
            ("salt", "the same tokens under other salts", "salt", "tenant-a", "tenant-b"),
            ("lora", "the same tokens with other LoRA adapters", "lora", 1, 2),
            ("image", "the same tokens around other images", "image", 1, 2),
        ):
            yield _Story(
                name, what,
                serve(ask((1, 4, 2))), serve(ask((1, 4, 2), serving="none", **{field: mine})), new,
                serve(ask((1, 4, 2), serving="none", **{field: others})), serve(ask((1, 4, 2), **{field: mine})),
                serve(ask((1, 4, 2))),
            )  # fmt: skip
        yield _Story(
            "image-without-hashes", "images that come without hashes have no key: nothing is stored or served",
            serve(ask((1, 4, 2), image=1, has_hashes=False, serving="none")), new,
            serve(ask((1, 4, 2), image=2, has_hashes=False, serving="none")),
            serve(ask((1, 4, 2), serving="none")),
        )  # fmt: skip

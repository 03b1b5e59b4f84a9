"""A request as the runtime and a connector see it, and the batch of one pass."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch


class RequestState(str, Enum):
    """Where a request stands; the names are the runtime's."""

    CONTEXT_INIT = "CONTEXT_INIT"
    #: Disaggregated: its KV is going to be received.
    DISAGG_GENERATION_INIT = "DISAGG_GENERATION_INIT"
    GENERATION_IN_PROGRESS = "GENERATION_IN_PROGRESS"
    #: Its last token is being computed: no further pass schedules it (overlap loop).
    GENERATION_TO_COMPLETE = "GENERATION_TO_COMPLETE"
    GENERATION_COMPLETE = "GENERATION_COMPLETE"
    #: Parked: an asynchronous load is under way.
    DISAGG_GENERATION_TRANS_IN_PROGRESS = "DISAGG_GENERATION_TRANS_IN_PROGRESS"
    #: Finished, its pages kept for an asynchronous save.
    DISAGG_CONTEXT_TRANS_IN_PROGRESS = "DISAGG_CONTEXT_TRANS_IN_PROGRESS"


#: In these states everything but the last token has its KV.
GENERATION_STATES = (
    RequestState.GENERATION_IN_PROGRESS,
    RequestState.GENERATION_TO_COMPLETE,
    RequestState.GENERATION_COMPLETE,
    RequestState.DISAGG_CONTEXT_TRANS_IN_PROGRESS,
)

#: In these states a report uses position and chunk; in any other, the last token (golden l.state_formula).
CONTEXT_STATES = (RequestState.CONTEXT_INIT, RequestState.DISAGG_GENERATION_TRANS_IN_PROGRESS)


class Request:
    """One prompt and what came of it, with the ``LlmRequest`` attributes that connectors read.

    Attributes:
        output_tokens: Generated token ids.
        first_logits: Float32 copy, ``[vocabulary]``, of the logits from which the first token was chosen.
        ttft_s: Seconds from submission to the first token.
        device_tokens: Prompt tokens that device reuse supplied.
        honoured_tokens: Prompt tokens that the connector supplied.
        passes: ``(position, tokens)`` of each prefill pass: equal passes give bit-equal results.
        error: What a forward, a per-layer hook or ``wait_for_save`` raised; the request ended there.
        prompt_len: Prompt tokens; after a replay those generated before it are among them.
        orig_prompt_len: Prompt tokens as submitted.
        replays: How often its pages were destroyed and it began anew.
        is_cancelled: It ended by :meth:`Executor.cancel`.
        is_suspended: It keeps its pages and is in no batch.
        awaits_replay: Its pages go once its token in flight is known; it is in no batch until then (overlap loop).
        token_in_flight: A sampled token that the host doesn't know yet (overlap loop).

    Source: contract.md section 5.
    """

    def __init__(
        self,
        request_id: int,
        prompt_tokens: Sequence[int],
        max_new_tokens: int,
        *,
        cache_salt: str | None = None,
        lora_task_id: int | None = None,
        multimodal_hashes: list[list[int]] | None = None,
        multimodal_positions: list[int] | None = None,
        multimodal_lengths: list[int] | None = None,
        client_id: int | None = None,
        stop_tokens: Collection[int] = (),
    ) -> None:
        self.request_id = request_id
        self.prompt_len = self.orig_prompt_len = len(prompt_tokens)
        self.max_new_tokens = max_new_tokens
        self.cache_salt = cache_salt
        self.lora_task_id = lora_task_id
        self.multimodal_hashes = multimodal_hashes
        self.multimodal_positions = multimodal_positions
        self.multimodal_lengths = multimodal_lengths
        self.client_id = client_id
        self.stop_tokens = frozenset(stop_tokens)
        self.is_dummy_request = False
        self.is_child = False
        self.parent_request_id: int | None = None
        self.kv_cache_retention_config: Any = None
        self.state = RequestState.CONTEXT_INIT
        self.context_current_position = 0
        self.context_chunk_size = self.prompt_len
        #: Where the first chunk begins: behind what the device and the connector supplied.
        self.prepopulated_prompt_len = 0
        #: Set once the alloc callback was made, cleared with the allocation (contract-v2.md section 1.2).
        self.py_connector_allocation_reported = False
        self.py_num_connector_matched_tokens: int | None = None
        self.py_draft_tokens: list[int] = []

        self._tokens = list(prompt_tokens)
        self.first_logits: torch.Tensor | None = None
        self.ttft_s: float | None = None
        self.device_tokens = 0
        self.honoured_tokens = 0
        self.passes: list[tuple[int, int]] = []
        self.error: Exception | None = None
        self.replays = 0
        self.is_cancelled = False
        self.is_suspended = False
        self.awaits_replay = False
        self.token_in_flight: int | None = None
        self.submitted_at = time.perf_counter()

    @property
    def py_request_id(self) -> int:
        """The executor's name for ``request_id``."""
        return self.request_id

    @property
    def py_client_id(self) -> int | None:
        """The id by which the front process knows the request."""
        return self.client_id

    @property
    def py_prompt_len(self) -> int:
        """Prompt tokens."""
        return self.prompt_len

    def get_tokens(self, beam: int | None = None) -> list[Any]:
        """A copy of the token ids of a beam (there is one), or the list of beams."""
        return list(self._tokens) if beam is not None else [list(self._tokens)]

    @property
    def num_tokens(self) -> int:
        """Prompt and generated tokens, as far as the host knows them."""
        return len(self._tokens)

    @property
    def num_device_tokens(self) -> int:
        """The same, with a token in flight: the last of them is the next generation step's input."""
        return len(self._tokens) + (self.token_in_flight is not None)

    @property
    def last_token(self) -> int:
        """The input of the next generation step."""
        return self._tokens[-1] if self.token_in_flight is None else self.token_in_flight

    @property
    def output_tokens(self) -> list[int]:
        """The generated token ids."""
        return self._tokens[self.orig_prompt_len :]

    def append_token(self, token: int) -> None:
        """Take a sampled token."""
        self._tokens.append(token)
        self.token_in_flight = None

    def append_sample(self, token: int, logits: torch.Tensor) -> None:
        """Take a sampled token; the first one's logits are kept."""
        if self.first_logits is None:
            self.first_logits = logits.to(device="cpu", dtype=torch.float32, copy=True)
            self.ttft_s = time.perf_counter() - self.submitted_at
        self.append_token(token)

    @property
    def is_done(self) -> bool:
        """It has all its tokens, or the last one ends it."""
        output = self.output_tokens
        return len(output) >= self.max_new_tokens or (bool(output) and output[-1] in self.stop_tokens)

    def tokens_between(self, start: int, end: int) -> list[int]:
        """Token ids ``[start, end)``."""
        return self._tokens[start:end]

    @property
    def context_remaining_length(self) -> int:
        """Prompt tokens from the current position on."""
        return self.prompt_len - self.context_current_position

    @property
    def is_first_context_chunk(self) -> bool:
        """No chunk has run yet; a served prefix doesn't change that."""
        return self.context_current_position == self.prepopulated_prompt_len

    @property
    def is_last_context_chunk(self) -> bool:
        """The scheduled chunk reaches the end of the prompt."""
        return self.context_current_position + self.context_chunk_size >= self.prompt_len

    @property
    def is_finished(self) -> bool:
        """All tokens were generated, or the request failed or was cancelled."""
        return self.state in (RequestState.GENERATION_COMPLETE, RequestState.DISAGG_CONTEXT_TRANS_IN_PROGRESS)

    def is_generation_only_request(self) -> bool:
        """False: prefill always happens here."""
        return False

    @property
    def written_tokens(self) -> int:
        """Tokens with KV beyond what was entered into device reuse chunk by chunk; 0 while the prompt is computed."""
        return self.num_tokens - 1 if self.state in GENERATION_STATES and self.output_tokens else 0

    def reset_for_recompute(self) -> None:
        """Begin anew after the pages were destroyed: what was generated is part of the prompt now.

        Source: contract-v2.md section 1.4, last row but two.
        """
        self.prompt_len = self.num_tokens
        self.state = RequestState.CONTEXT_INIT
        self.honoured_tokens = 0
        self.replays += 1
        self.begin_at(0, self.prompt_len)

    def begin_at(self, position: int, chunk: int) -> None:
        """Place the first chunk behind what was supplied."""
        self.context_current_position = position
        self.prepopulated_prompt_len = position
        self.context_chunk_size = chunk


@dataclass
class Batch:
    """The requests of one pass, prefill first: chunks that don't reach the prompt's end, last chunks, generation."""

    chunking: list[Request] = field(default_factory=list)
    last_chunk: list[Request] = field(default_factory=list)
    generation: list[Request] = field(default_factory=list)

    @property
    def context(self) -> list[Request]:
        """Every prefill request, in the order in which they are prepared and reported."""
        return [*self.chunking, *self.last_chunk]

    def add_context(self, request: Request) -> None:
        """File a prefill request by whether its chunk is the last."""
        (self.last_chunk if request.is_last_context_chunk else self.chunking).append(request)

    def resort(self) -> None:
        """File the prefill requests anew after chunks have moved."""
        requests = self.context
        self.chunking, self.last_chunk = [], []
        for request in requests:
            self.add_context(request)

    def without_dummies(self) -> Batch:
        """The batch of the requests that somebody asked for."""
        parts = (self.chunking, self.last_chunk, self.generation)
        return Batch(*([request for request in part if not request.is_dummy_request] for part in parts))

    def __iter__(self) -> Iterator[Request]:
        return iter([*self.context, *self.generation])

    def __bool__(self) -> bool:
        return bool(self.chunking or self.last_chunk or self.generation)

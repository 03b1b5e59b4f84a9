"""A proxy in front of an S3 server that answers wrongly when it is told to: busy, broken off, altered, slow, gone.

::

    with FaultProxy("http://127.0.0.1:8333") as proxy:
        proxy.fault = status(503, "SlowDown")      # every request from here on
        proxy.fault = on("GET", cut_after(1000))   # only reads
        proxy.fault = None

It speaks as much HTTP/1.1 as S3 clients do and forwards requests as they are, so signatures stay right. Errors of its own end the
connection, as those of a real one do.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from types import TracebackType
from urllib.parse import urlsplit

_PIECE = 64 << 10
_HEAD_LIMIT = 64 << 10


@dataclass(frozen=True)
class Call:
    """A request that the proxy was asked to forward."""

    method: str
    target: str
    number: int


@dataclass(frozen=True)
class Answer:
    """What happens to one answer.

    Attributes:
        status: Answer so at once, without asking the server.
        code: S3's error code in the body of such an answer.
        cut_after: End the connection after so many bytes of the body.
        alter_at: Flip a bit of this byte of the body.
        shorten_to: Pretend that the body is so long, header included.
        bytes_per_s: Send the body no faster.
        stall: Never answer.
    """

    status: int | None = None
    code: str = ""
    cut_after: int | None = None
    alter_at: int | None = None
    shorten_to: int | None = None
    bytes_per_s: int | None = None
    stall: bool = False


#: Decides for each request; None lets it pass.
Fault = Callable[[Call], Answer | None]


def status(number: int, code: str) -> Fault:
    """Answer every request with an error of S3's."""
    return lambda _: Answer(status=number, code=code)


def cut_after(nbytes: int) -> Fault:
    """Break off every body after so many bytes."""
    return lambda _: Answer(cut_after=nbytes)


def altered_at(position: int) -> Fault:
    """Flip a bit in every body that is long enough."""
    return lambda _: Answer(alter_at=position)


def shortened_to(nbytes: int) -> Fault:
    """Give less than was asked for, in good order: the header says so, too."""
    return lambda _: Answer(shorten_to=nbytes)


def slowed_to(bytes_per_s: int) -> Fault:
    """Let every body trickle."""
    return lambda _: Answer(bytes_per_s=bytes_per_s)


def stalled(_: Call) -> Answer:
    """Never answer."""
    return Answer(stall=True)


def on(method: str, fault: Fault, part: str = "") -> Fault:
    """``fault``, for requests of a method whose target contains ``part``."""
    return lambda call: fault(call) if call.method == method and part in call.target else None


def first(count: int, fault: Fault) -> Fault:
    """``fault`` for the first so many requests that it is asked about."""
    left = [count]

    def decide(call: Call) -> Answer | None:
        answer = fault(call) if left[0] > 0 else None
        left[0] -= answer is not None
        return answer

    return decide


@dataclass
class _Head:
    """A start line and headers, as they came."""

    raw: bytes
    line: list[str] = field(default_factory=list)
    headers: dict[str, str] = field(default_factory=dict)


class FaultProxy:
    """Runs on a thread with a loop of its own, on the loopback address, from ``__enter__`` to ``__exit__``.

    Attributes:
        endpoint: Where clients connect to.
        fault: What is wrong now; may be set from any thread at any time.
        calls: Every request so far.
    """

    def __init__(self, upstream: str) -> None:
        parts = urlsplit(upstream)
        self._host, self._port = parts.hostname or "127.0.0.1", parts.port or 80
        self.endpoint = ""
        self.fault: Fault | None = None
        self.calls: list[Call] = []
        self._ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._done = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="tracekv-fault-proxy", daemon=True)

    def __enter__(self) -> FaultProxy:
        self._thread.start()
        if not self._ready.wait(10):
            raise RuntimeError("tracekv: the fault proxy did not start within 10 s")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._done.set)
        self._thread.join(10)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0, limit=_HEAD_LIMIT)
        self.endpoint = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self._ready.set()
        await self._done.wait()
        server.close()
        rest = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream: asyncio.StreamWriter | None = None
        try:
            answers, upstream = await asyncio.open_connection(self._host, self._port, limit=_HEAD_LIMIT)
            while await self._exchange(reader, writer, answers, upstream):
                pass
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, asyncio.CancelledError):
            pass  # either side went away, or the proxy ends
        finally:
            for each in (writer, upstream):
                if each is not None:
                    each.transport.abort()

    async def _exchange(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        answers: asyncio.StreamReader,
        upstream: asyncio.StreamWriter,
    ) -> bool:
        """One request and its answer; False where the connection ends with it."""
        request = await _read_head(reader)
        call = Call(request.line[0], request.line[1], len(self.calls))
        self.calls.append(call)
        fault = self.fault
        answer = (fault(call) if fault else None) or Answer()
        if answer.stall:
            await self._done.wait()
        if answer.status is not None:
            async for _ in _body(reader, request, call.method):
                pass
            body = f"<?xml version='1.0'?><Error><Code>{answer.code}</Code><Message>fault</Message></Error>".encode()
            head = f"HTTP/1.1 {answer.status} Fault\r\nContent-Type: application/xml\r\nContent-Length: {len(body)}\r\n\r\n"
            writer.write(head.encode() + (body if call.method != "HEAD" else b""))
            await writer.drain()
            return True
        upstream.write(request.raw)
        if request.headers.get("expect"):
            await upstream.drain()
            interim = await _read_head(answers)
            writer.write(interim.raw)
        async for piece in _body(reader, request, call.method):
            upstream.write(piece)
            await upstream.drain()
        response = await _read_head(answers)
        if answer.shorten_to is not None and "content-length" in response.headers:
            response.raw = response.raw.replace(
                b"ength: " + response.headers["content-length"].encode(), b"ength: %d" % answer.shorten_to
            )
        writer.write(response.raw)
        return await _send(writer, _body(answers, response, call.method, is_answer=True), answer)


async def _send(writer: asyncio.StreamWriter, body: AsyncIterator[bytes], answer: Answer) -> bool:
    sent = 0
    async for whole in body:
        piece = bytearray(whole)
        if answer.alter_at is not None and sent <= answer.alter_at < sent + len(piece):
            piece[answer.alter_at - sent] ^= 1
        for limit in (answer.cut_after, answer.shorten_to):
            if limit is not None and sent + len(piece) > limit:
                writer.write(bytes(piece[: limit - sent]))
                with contextlib.suppress(OSError):
                    await writer.drain()
                    writer.write_eof()
                    await asyncio.sleep(0.05)  # let it leave before the connection is torn down
                return False
        if answer.bytes_per_s is not None:
            step = max(1, answer.bytes_per_s // 20)
            for start in range(0, len(piece), step):
                writer.write(bytes(piece[start : start + step]))
                await writer.drain()
                await asyncio.sleep(step / answer.bytes_per_s)
        else:
            writer.write(bytes(piece))
            await writer.drain()
        sent += len(piece)
    return True


async def _read_head(reader: asyncio.StreamReader) -> _Head:
    head = _Head(await reader.readuntil(b"\r\n\r\n"))
    first_line, *lines = head.raw.decode("latin-1").strip().split("\r\n")
    head.line = first_line.split(" ")
    for line in lines:
        name, _, value = line.partition(":")
        head.headers[name.lower()] = value.strip()
    return head


async def _body(
    reader: asyncio.StreamReader, head: _Head, method: str, *, is_answer: bool = False
) -> AsyncIterator[bytes]:
    """The bytes of a body as they are on the wire."""
    if is_answer and (method == "HEAD" or head.line[1] in ("204", "304")):
        return
    if head.headers.get("transfer-encoding", "").lower() == "chunked":
        while True:
            size = await reader.readuntil(b"\r\n")
            length = int(size.split(b";")[0], 16)
            yield size + await reader.readexactly(length + 2)
            if not length:
                return
    left = int(head.headers.get("content-length", 0))
    while left:
        piece = await reader.read(min(_PIECE, left))
        if not piece:
            raise ConnectionResetError
        left -= len(piece)
        yield piece

"""A client that costs little: what arrives is kept with its time, and read
only when the run is over.

A Driver keeps a number of connections busy with streamed requests: one thread,
epoll.  A connection is used again if the server leaves it open.  Of a reply
nothing is looked at but its head and whether it has ended.
"""

import bisect
import gc
import json
import re
import select
import socket
import time

HOST = "127.0.0.1"
CHAT = "/v1/chat/completions"
END = b"\r\n0\r\n\r\n"
READ_BYTES = 65536
TRIES = 3

clock = time.perf_counter


class Failed(Exception):
    """A run that is worth nothing."""


def post(body, path=CHAT):
    """A whole request, ready to be sent."""
    data = json.dumps(body).encode()
    return (f"POST {path} HTTP/1.1\r\nHost: bench\r\n"
            "Content-Type: application/json\r\n"
            f"Content-Length: {len(data)}\r\n\r\n").encode() + data


class Reply:
    """What came back for a request, and when."""

    def __init__(self, request, kind="stream"):
        self.request = request
        self.kind = kind
        self.sent = None
        self.ended = None       # None: cut off
        self.head = None
        self.parts = []         # (time, bytes) as read, behind the head
        self.chunked = False
        self.left = None        # bytes that are missing, if known
        self.tail = b""

    def take(self, now, data):
        """Bytes from the socket.  True at the end of the reply."""
        if self.head is None:
            head, found, data = (self.tail + data).partition(b"\r\n\r\n")
            if not found:
                self.tail = head
                return False
            self._read_head(head)
        self.parts.append((now, data))
        if self.chunked:
            # events never hold such lines, so this is the last chunk
            self.tail = (self.tail + data)[-len(END):]
            return self.tail == END
        if self.left is not None:
            self.left -= len(data)
            return self.left <= 0
        return False

    def _read_head(self, head):
        self.head = head
        low = head.lower()
        self.chunked = b"transfer-encoding: chunked" in low
        length = re.search(rb"content-length: *(\d+)", low)
        if length:
            self.left = int(length[1])
        self.tail = b"\r\n"

    @property
    def whole_at_close(self):
        return self.head is not None and not self.chunked and self.left is None

    @property
    def closes(self):
        return (self.whole_at_close
                or b"connection: close" in self.head.lower())

    def events(self):
        """(time, decoded JSON) of each event that is complete."""
        body, sizes, times = bytearray(), [], []
        chunks = Chunks() if self.chunked else None
        for t, data in self.parts:
            body += chunks.decode(data) if chunks else data
            sizes.append(len(body))
            times.append(t)
        at = 0
        while (end := body.find(b"\n\n", at)) >= 0:
            event, at = bytes(body[at:end]).strip(), end + 2
            if event.startswith(b"data:") and event[5:].strip() != b"[DONE]":
                yield (times[bisect.bisect_left(sizes, at)],
                       json.loads(event[5:]))


class Chunks:
    """Takes the framing of chunked transfer away, piece by piece."""

    def __init__(self):
        self.rest = b""
        self.left = 0       # of the chunk, with the line end behind it

    def decode(self, data):
        out = bytearray()
        data = self.rest + data
        while data:
            if self.left == 0:
                line, found, after = data.partition(b"\r\n")
                if not found:
                    break
                self.left, data = int(line.split(b";")[0] or b"0", 16) + 2, \
                    after
                continue
            piece, data = data[:self.left], data[self.left:]
            out += piece[:max(0, min(len(piece), self.left - 2))]
            self.left -= len(piece)
        self.rest = data
        return out


class Answer:
    """One reply, read: when tokens came, how many, what they say."""

    def __init__(self, reply):
        self.kind = reply.kind
        self.sent = reply.sent
        self.ended = reply.ended
        self.arrivals = []      # times of events with text
        self.text = ""
        self.error = None
        self.prompt_tokens = self.tokens = 0
        usage = {}
        if reply.head is not None and b" 200 " not in reply.head[:16]:
            self.error = repr((reply.head[:60],
                               b"".join(d for _, d in reply.parts)[:300]))
            return
        for t, event in reply.events():
            if "error" in event:
                self.error = json.dumps(event)[:300]
            for choice in event.get("choices") or ():
                text = (choice.get("delta") or {}).get("content") or ""
                if text:
                    self.arrivals.append(t)
                    self.text += text
            usage = event.get("usage") or usage
        self.prompt_tokens = usage.get("prompt_tokens", 0)
        # of a reply that was cut off, what could be seen
        self.tokens = usage.get("completion_tokens", len(self.arrivals))
        if self.ended and not self.error and not self.tokens:
            self.error = "no tokens in the reply"

    @property
    def first(self):
        """When the first token came; of one without text, the end."""
        return self.arrivals[0] if self.arrivals else self.ended

    @property
    def ttft_ms(self):
        return 1000 * (self.first - self.sent)

    def gaps_ms(self, until=None):
        """Between events; until: a reply that was cut off there."""
        at = self.arrivals + ([until] if until and self.arrivals else [])
        return [1000 * (b - a) for a, b in zip(at, at[1:])]


class Connection:
    """One client: at most one request at a time."""

    def __init__(self, driver):
        self.driver = driver
        self.sock = None
        self.reply = None
        self.out = b""
        self.fresh = True       # opened for this request
        self.tries = 0

    def start(self, reply):
        self.reply = reply
        self.tries = 0
        reply.sent = clock()
        self._send()

    def _send(self):
        self.out = self.reply.request
        self.tries += 1
        self.fresh = self.sock is None
        if self.fresh:
            self.sock = self.driver.connect(self)
        else:
            self._write()

    def _write(self):
        try:
            n = self.sock.send(self.out)
        except BlockingIOError:
            n = 0
        except OSError as problem:
            self._lost(problem)
            return
        self.out = self.out[n:]
        if self.out or self.fresh:
            self.driver.poll.modify(self.sock, select.EPOLLIN | (
                select.EPOLLOUT if self.out else 0))

    def ready(self, now, event):
        """The socket can be read or written."""
        if event & select.EPOLLOUT and self.out:
            self._write()
        if self.sock is None or not event & ~select.EPOLLOUT:
            return
        try:
            data = self.sock.recv(READ_BYTES)
        except BlockingIOError:
            return
        except OSError as problem:
            self._lost(problem)
            return
        if not data:
            self._lost("end of file")
        elif self.reply is None:
            self.close()
        elif self.reply.take(now, data):
            if self.reply.closes:
                self.close()
            self.reply.ended = now

    def _lost(self, why):
        """The server has closed the connection."""
        self.close()
        reply = self.reply
        if reply is None:
            return
        untouched = reply.head is None and not reply.tail
        if reply.whole_at_close:
            reply.ended = clock()
        elif untouched and not self.fresh and self.tries < TRIES:
            # it may close an old connection just as a new request arrives
            self._send()
        else:
            raise Failed(f"connection closed early: {why}")

    def close(self):
        if self.sock is not None:
            self.driver.forget(self.sock)
            self.sock.close()
            self.sock = None


class Driver:
    """Keeps n_clients connections busy until there is nothing more to ask.

    next_reply(i, ended) gives connection i its next Reply, or None; ended is
    its reply before that, None at first.  timer(driver), every 20 ms, may
    start requests of its own and says True to cut off what still runs.
    replies: all of them, in the order in which they were sent."""

    def __init__(self, port, n_clients, next_reply, timer=None):
        self.port = port
        self.next_reply = next_reply
        self.timer = timer
        self.poll = select.epoll()
        self.by_fd = {}
        self.connections = [Connection(self) for _ in range(n_clients)]
        self.replies = []
        self.started = self.stopped = None

    def connect(self, connection):
        sock = socket.socket()
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.connect_ex((HOST, self.port))
        self.by_fd[sock.fileno()] = connection
        self.poll.register(sock, select.EPOLLIN | select.EPOLLOUT)
        return sock

    def forget(self, sock):
        del self.by_fd[sock.fileno()]

    def start(self, i, reply):
        self.replies.append(reply)
        self.connections[i].start(reply)

    def run(self, patience_s=900):
        gc.disable()
        try:
            self._run(patience_s)
        finally:
            gc.enable()
            for connection in self.connections:
                connection.close()
            self.poll.close()
        return self

    def _run(self, patience_s):
        self.started = clock()
        for i in range(len(self.connections)):
            self._advance(i)
        while any(c.reply for c in self.connections):
            for fd, event in self.poll.poll(0.02 if self.timer else 1):
                connection = self.by_fd.get(fd)
                if connection is None:
                    continue
                connection.ready(clock(), event)
                if connection.reply and connection.reply.ended:
                    self._advance(self.connections.index(connection))
            if self.timer and self.timer(self):
                break
            if clock() > self.started + patience_s:
                raise Failed("no end to the replies")
        self.stopped = clock()

    def _advance(self, i):
        ended, self.connections[i].reply = self.connections[i].reply, None
        reply = self.next_reply(i, ended)
        if reply is not None:
            self.start(i, reply)

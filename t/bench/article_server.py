"""nginx with real engines, and the client that measures them.

Server starts one nginx with an engine for each name it is given, each on a
port of its own, so that two settings can be measured in turn without a
restart.  Stream is one request: it notes when which token arrived.  Everything
is ended by its pid.
"""

import asyncio
import json
import os
import re
import resource
import shutil
import signal
import socket
import statistics
import subprocess
import tempfile
import time
import urllib.request

HOST = "127.0.0.1"
PATIENCE_S = 60
REQUEST_S = 300


given = set()


def free_port():
    """Not the same twice: one that was given is free until it is used."""
    while True:
        with socket.socket() as s:
            s.bind((HOST, 0))
            port = s.getsockname()[1]
        if port not in given:
            given.add(port)
            return port


def quantile(values, q):
    """The q-quantile by the nearest rank; NaN of nothing."""
    values = sorted(values)
    if not values:
        return float("nan")
    return values[min(len(values) - 1, int(q * len(values)))]


def median(values):
    return statistics.median(values) if values else float("nan")


def spread(values):
    """(min, median, max)."""
    return (min(values), median(values), max(values)) if values else (
        (float("nan"),) * 3)


class Server:
    """with Server(setup, {"on": "prefix_caching on;", …}) as server: …"""

    def __init__(self, setup, engines, address_space=0):
        self.setup = setup
        self.engines = engines
        self.address_space = address_space
        self.ports = {name: free_port() for name in engines}
        self.process = None
        self.dir = None

    def __enter__(self):
        self.dir = tempfile.mkdtemp(prefix="llm-article-")
        try:
            self._start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_):
        self.stop()

    def _place(self, path, name):
        """A link to a file that nginx's user may read."""
        place = os.path.join(self.dir, name)
        try:
            os.link(path, place)
        except OSError:
            shutil.copy(path, place)
        return place

    def _conf(self):
        setup = self.setup
        module = self._place(f"{setup.build}/ngx_http_llm_module.so", "llm.so")
        program = self._place(f"{setup.build}/llm-engine", "llm-engine")
        model = self._place(setup.model, "model.gguf")
        os.chmod(model, 0o644)
        user = "user www-data;" if os.getuid() == 0 else ""
        temp = "".join(f"{kind}_temp_path {self.dir}/{kind};\n" for kind in (
            "client_body", "proxy", "fastcgi", "uwsgi", "scgi"))
        engines = "".join(
            f"llm_engine {name} {{ model {model} alias=smollm2; "
            f"program {program}; {options} }}\n"
            for name, options in self.engines.items())
        servers = "".join(
            f"server {{ listen {HOST}:{port}; client_max_body_size 8m;\n"
            f"client_body_buffer_size 256k;\n"
            f"location / {{ llm_pass {name}; }}\n"
            f"location = /metrics {{ llm_metrics; }} }}\n"
            for name, port in self.ports.items())
        return (f"{user}\nload_module {module};\nworker_processes 1;\n"
                f"error_log {self.dir}/error.log info;\n"
                f"events {{ }}\nhttp {{\naccess_log off;\n{temp}"
                f"{engines}{servers}}}\n")

    def _limit(self):
        if self.address_space:
            resource.setrlimit(resource.RLIMIT_AS, (self.address_space,) * 2)

    def _start(self):
        os.chmod(self.dir, 0o755)
        conf = os.path.join(self.dir, "nginx.conf")
        with open(conf, "w", encoding="utf-8") as f:
            f.write(self._conf())
        with open(f"{self.dir}/stderr.log", "ab") as err:
            self.process = subprocess.Popen(
                [self.setup.nginx, "-p", self.dir, "-c", conf, "-e",
                 f"{self.dir}/error.log", "-g",
                 f"daemon off; pid {self.dir}/nginx.pid;"],
                stdout=err, stderr=err, preexec_fn=self._limit)
        end = time.monotonic() + PATIENCE_S
        for name in self.engines:
            while not self._healthy(name):
                if (self.process.poll() is not None or time.monotonic() > end
                        or "cannot be respawned" in self.log()):
                    raise RuntimeError(f"engine {name} does not start:\n"
                                       + self.log() + self.log("stderr.log"))
                time.sleep(0.05)

    def _healthy(self, name):
        try:
            with self._get(name, "/health") as response:
                return response.status == 200
        except OSError:
            return False

    def _get(self, name, path):
        return urllib.request.urlopen(
            f"http://{HOST}:{self.ports[name]}{path}", timeout=10)

    def log(self, name="error.log"):
        try:
            with open(f"{self.dir}/{name}", encoding="utf-8",
                      errors="replace") as f:
                return f.read()
        except OSError:
            return ""

    def metrics(self, name):
        """{metric: value} of one engine."""
        with self._get(name, "/metrics") as response:
            return read_metrics(response.read().decode(), name)

    def engine_memory(self):
        """The engine's memory by the kernel, VmSize and so on, in bytes."""
        pid, = self._children("llm-engine")
        with open(f"/proc/{pid}/status", encoding="ascii") as f:
            return {name: int(kb) * 1024 for name, kb in re.findall(
                r"^(Vm\w+|RssAnon):\s+(\d+)", f.read(), re.M)}

    def pids(self):
        """nginx's master and its children, the engine among them."""
        return [self.process.pid, *self._children()]

    def _children(self, program=None):
        pids = []
        for entry in os.listdir("/proc"):
            try:
                with open(f"/proc/{entry}/stat", encoding="ascii") as f:
                    m = re.match(r"\d+ \((.*)\) \S (\d+)", f.read())
            except OSError:
                continue
            if m and int(m[2]) == self.process.pid and program in (None, m[1]):
                pids.append(int(entry))
        return pids

    def stop(self):
        if self.process is not None:
            if self.process.poll() is None:
                children = self._children()
                self.process.send_signal(signal.SIGTERM)
                try:
                    self.process.wait(20)
                except subprocess.TimeoutExpired:
                    for pid in children:
                        os.kill(pid, signal.SIGKILL)
                    self.process.kill()
                    self.process.wait()
            self.process = None
        if self.dir and not os.environ.get("LLM_TEST_LEAVE"):
            shutil.rmtree(self.dir, ignore_errors=True)


def read_metrics(text, engine):
    found = {}
    for name, labels, value in re.findall(
            r"^([\w:]+)\{([^}]*)\} (\S+)$", text, re.M):
        if f'engine="{engine}"' in labels:
            found.setdefault(name, float(value))
    return found


class Stream(asyncio.Protocol):
    """One streamed request, over HTTP/1.0 so that the body is plain events.

    arrivals: (time, completion tokens so far) for each event with new ones.
    """

    COUNT = re.compile(rb'"completion_tokens":\s*(\d+)')

    def __init__(self, path, body, on_tokens=None):
        body = dict(body, stream=True, stream_options={
            "include_usage": True, "continuous_usage_stats": True})
        data = json.dumps(body).encode()
        self.request = (f"POST {path} HTTP/1.0\r\nHost: bench\r\n"
                        "Content-Type: application/json\r\n"
                        f"Content-Length: {len(data)}\r\n\r\n").encode() + data
        self.n_prompt = len(body.get("prompt", ()))
        self.on_tokens = on_tokens
        self.buffer = b""
        self.head = None
        self.arrivals = []
        self.tokens = 0
        self.events = []
        self.usage = None
        self.started = None
        self.ended = None
        self.transport = None
        self.done = asyncio.get_running_loop().create_future()

    def connection_made(self, transport):
        self.transport = transport
        self.started = time.perf_counter()
        transport.write(self.request)

    def data_received(self, data):
        now = time.perf_counter()
        self.buffer += data
        if self.head is None:
            head, found, rest = self.buffer.partition(b"\r\n\r\n")
            if not found:
                return
            self.head, self.buffer = head, rest
        if not self.ok:
            return
        *events, self.buffer = self.buffer.split(b"\n\n")
        for event in events:
            self._event(event, now)

    def _event(self, event, now):
        if not event.startswith(b"data: {"):
            return
        found = self.COUNT.search(event)
        if found and int(found[1]) > self.tokens:
            self.tokens = int(found[1])
            self.arrivals.append((now, self.tokens))
            if self.on_tokens:
                self.on_tokens(self)
        self.events.append(event)

    def connection_lost(self, exc):
        self.ended = time.perf_counter()
        if not self.done.done():
            self.done.set_result(self)

    @property
    def ok(self):
        return self.head is not None and b" 200 " in self.head[:16]

    @property
    def ttft(self):
        return self.arrivals[0][0] - self.started

    def gaps(self, start=0.0, end=float("inf")):
        """Seconds between events that arrived within [start, end]."""
        at = [t for t, _ in self.arrivals if start <= t <= end]
        return [b - a for a, b in zip(at, at[1:])]

    def finish(self):
        """Reads the usage; the last event has it."""
        self.usage = json.loads(self.events[-1][6:])["usage"]

    @property
    def text(self):
        text = ""
        for event in self.events:
            for choice in json.loads(event[6:])["choices"]:
                text += (choice.get("text")
                         or choice.get("delta", {}).get("content") or "")
        return text

    @property
    def cached(self):
        return self.usage["prompt_tokens_details"]["cached_tokens"]


async def open_stream(port, path, body, on_tokens=None):
    loop = asyncio.get_running_loop()
    _, stream = await loop.create_connection(
        lambda: Stream(path, body, on_tokens), HOST, port)
    return stream


async def ask(port, path, body, on_tokens=None):
    """Sends a request and waits for its end."""
    stream = await open_stream(port, path, body, on_tokens)
    try:
        await asyncio.wait_for(stream.done, REQUEST_S)
    finally:
        stream.transport.abort()
    if not stream.ok:
        raise RuntimeError(f"{path}: {stream.head!r} {stream.buffer[:300]!r}")
    stream.finish()
    return stream


async def closed_loop(port, n_clients, requests, on_tokens=None):
    """n_clients at a time until the list of (path, body) is done; their
    streams."""
    queue = iter(enumerate(requests))
    ended = [None] * len(requests)

    async def client():
        for i, (path, body) in queue:
            ended[i] = await ask(port, path, body, on_tokens)

    await asyncio.gather(*(client() for _ in range(n_clients)))
    return ended


async def fetch_metrics(port, engine):
    reader, writer = await asyncio.open_connection(HOST, port)
    writer.write(b"GET /metrics HTTP/1.0\r\n\r\n")
    text = await reader.read()
    writer.close()
    return read_metrics(text.decode(), engine)

"""Who is measured: our server, llama.cpp's, OpenVINO GenAI in a process.

All have start, stop, pause and resume.  A paused side gets no processor at all
(SIGSTOP), so that only one is at work at any time.  bench() measures without
HTTP: prefill and decode of one sequence.
"""

import json
import os
import re
import signal
import subprocess
import time
import urllib.request

from article_server import HOST, Server, free_port, median
from peer_client import Failed
from peer_work import HITS, Questions

START_S = 300
CONTEXT = 147456            # 32 slots of 4608 tokens
HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
REPEAT = 2                  # of what takes less than a second

# option sets of OpenVINO: none of them is best everywhere
OPTIONS = {
    "default": {},
    "bf16": {"INFERENCE_PRECISION_HINT": "bf16"},
    "u8": {"INFERENCE_PRECISION_HINT": "f32",
           "DYNAMIC_QUANTIZATION_GROUP_SIZE": "32",
           "KV_CACHE_PRECISION": "u8"},
}


def output(words, watch, **more):
    """What a program prints, and who used the processors meanwhile."""
    with watch([]) as used:
        done = subprocess.run(words, capture_output=True, text=True,
                              check=False, **more)
    if done.returncode:
        raise Failed(f"{os.path.basename(words[0])}: "
                     + done.stderr.strip()[-300:])
    return done.stdout, used.result


def worst_of(found, used):
    """Adds what a further part of a run has used."""
    for name, value in used.items():
        found[name] = max(value, found.get(name, 0))


class Ours:
    family = "ours"
    name = "ours"
    model = "smollm2"       # the alias that Server gives

    def __init__(self, setup, options=""):
        self.setup = setup
        self.options = options
        self.server = None
        self.running = False

    def start(self):
        self.server = Server(self.setup, {"peer": self.options})
        self.server.__enter__()
        self.running = True

    def stop(self):
        if self.running:
            self.server.stop()
            self.running = False

    def pause(self):
        """It takes no time when nobody asks."""

    def resume(self):
        pass

    @property
    def port(self):
        return self.server.ports["peer"]

    def pids(self):
        return self.server.pids()

    def bench(self, work, _seed, watch):
        found = {}
        for name, length in [*(("prefill", n) for n in work.prompts),
                             *(("decode", n) for n in work.depths)]:
            prefill = name == "prefill"
            text, used = output([
                f"{self.setup.build}/llm-engine", "bench", "--model",
                self.setup.model, "--threads", str(work.threads),
                "--prompt-tokens", str(length if prefill else 8),
                "--depth", str(0 if prefill else length),
                "--gen", str(1 if prefill else work.max_tokens),
                "--repeat", str(REPEAT)], watch)
            speed = re.search(rf"^{name} 1 × .*?([\d.]+) +([\d.]+) +([\d.]+) "
                              r"tok/s", text, re.M)
            if not speed:
                raise Failed(f"llm-engine bench says no {name}")
            found[f"{name} {length}"] = float(speed[2])
            worst_of(found, used)
        return found


class Child:
    """A process that can be stopped and continued."""

    def __init__(self, setup):
        self.setup = setup
        self.process = None
        self.log = None

    @property
    def running(self):
        return self.process is not None

    def spawn(self, words, env, **pipes):
        self.log = os.path.join(self.setup.out, "log-" + re.sub(
            r"[^\w-]+", "-", self.name) + ".txt")
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                words, env=dict(os.environ, **env), stderr=log,
                **{"stdout": log, **pipes})

    def died(self):
        with open(self.log, "rb") as log:
            return Failed(f"{self.name} has ended: "
                          + log.read()[-400:].decode(errors="replace"))

    def pids(self):
        return [self.process.pid]

    def pause(self):
        if self.running:
            self.process.send_signal(signal.SIGSTOP)

    def resume(self):
        self.process.send_signal(signal.SIGCONT)

    def stop(self):
        if self.running:
            self.resume()
            self.process.terminate()
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
            self.process = None


class Llama(Child):
    """llama-server and llama-bench.  A: flash attention, B: without it."""

    family = "L"
    model = "peer"

    def __init__(self, setup, flags):
        super().__init__(setup)
        self.flags = flags
        self.name = f"llama.cpp {flags}"
        self.flash = "on" if flags.startswith("A") else "off"
        self.port = None

    def start(self):
        self.port = free_port()
        more = self.flags.split()[1:]
        self.spawn([
            f"{self.setup.peer}/llama-server", "-m", self.setup.model,
            "--host", HOST, "--port", str(self.port), "-t",
            str(self.setup.cpus), "-np", "32", "-c", str(CONTEXT),
            "--no-kv-unified", "-cb", "-fa", self.flash, "--cache-ram", "0",
            *more, *(["-ub", more[1]] if more else [])], HUGE_PAGES)
        end = time.monotonic() + START_S
        while not self._healthy():
            if self.process.poll() is not None or time.monotonic() > end:
                raise self.died()
            time.sleep(0.2)

    def _healthy(self):
        try:
            with urllib.request.urlopen(f"http://{HOST}:{self.port}/health",
                                        timeout=5) as response:
                return response.status == 200
        except OSError:
            return False

    def bench(self, work, _seed, watch):
        words = [f"{self.setup.peer}/llama-bench", "-m", self.setup.model,
                 "-t", str(work.threads), "-fa", self.flash, "-r",
                 str(REPEAT), "-o", "json"]
        if work.prompts:
            words += ["-n", "0", "-p", ",".join(map(str, work.prompts))]
        else:
            words += ["-p", "0", "-n", str(work.max_tokens), "-d",
                      ",".join(map(str, work.depths))]
        text, found = output(words, watch, env=dict(os.environ, **HUGE_PAGES))
        for test in json.loads(text):
            what = (f"prefill {test['n_prompt']}" if test["n_prompt"]
                    else f"decode {test['n_depth']}")
            found[what] = median(test["samples_ts"])
        return found


class OpenVino(Child):
    """OpenVINO GenAI in a process of its own, without HTTP.  It is given all
    clients' prompts at once, as a batch: its best case."""

    family = "O"

    def __init__(self, setup, options, threads):
        super().__init__(setup)
        self.options = dict(OPTIONS[options])
        if threads != setup.cpus:
            self.options["INFERENCE_NUM_THREADS"] = threads
        self.name = f"OpenVINO {options}"

    def start(self):
        worker = os.path.join(os.path.dirname(__file__), "peer_openvino.py")
        self.spawn([self.setup.openvino, worker, self.setup.model,
                    json.dumps(self.options)], {}, stdin=subprocess.PIPE,
                   stdout=subprocess.PIPE, text=True)
        self._reply()

    def _reply(self):
        line = self.process.stdout.readline()
        if not line:
            raise self.died()
        said = json.loads(line)
        if "error" in said:
            raise Failed(said["error"])
        return said

    def ask(self, **command):
        try:
            self.process.stdin.write(json.dumps(command) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise self.died() from None
        return self._reply()

    def batches(self, work, seed, watch):
        """The same questions as a server gets, work.clients at a time."""
        questions = Questions(work, seed)
        chats = [questions.messages(i) for i in range(work.requests)]
        found = {}
        if work.kind == "shared":
            found["cold_ttft"] = 1000 * self.ask(
                chats=[questions.messages(-1)], max_tokens=1)["seconds"]
        else:
            self.ask(chats=[[{"role": "user", "content": f"Hello {seed}"}]],
                     max_tokens=4)
        with watch(self.pids()) as used:
            said = [self.ask(chats=chats[i:i + work.clients],
                             max_tokens=work.max_tokens)
                    for i in range(0, len(chats), work.clients)]
        tokens = sum(s["tokens"] for s in said)
        found["tok_s"] = tokens / sum(s["seconds"] for s in said)
        found["prompt_tokens"] = (sum(s["prompt_tokens"] for s in said)
                                  / len(chats))
        found["output_tokens"] = tokens / len(chats)
        if work.kind == "shared":
            found["hit"] = 1000 * median([self.ask(
                chats=[questions.messages(-2 - i)], max_tokens=1)["seconds"]
                for i in range(HITS)])
        found.update(used.result)
        return found

    def bench(self, work, seed, watch):
        found = {}
        self.ask(random=8, seed=f"{seed} warm", max_tokens=1)
        for n in work.prompts:
            with watch(self.pids()) as used:
                said = [self.ask(random=n, seed=f"{seed} {n} {i}",
                                 max_tokens=1) for i in range(REPEAT)]
            found[f"prefill {n}"] = median([n / s["seconds"] for s in said])
            worst_of(found, used.result)
        return found

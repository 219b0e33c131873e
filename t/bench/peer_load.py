"""One run of a workload against a server, and what was measured in it."""

import json
import os
import subprocess
import time

from article_server import median, quantile
from peer_client import Answer, Driver, Failed, Reply, post
from peer_work import HITS, Questions

LONG_TOKENS = 8


def request(side, messages, max_tokens, kind="stream"):
    return Reply(post({
        "model": side.model, "messages": messages, "max_tokens": max_tokens,
        "temperature": 0, "ignore_eos": True, "stream": True,
        "stream_options": {"include_usage": True}}), kind)


def in_turn(replies):
    """Whoever is free takes the next one."""
    queue = iter(replies)
    return lambda i, ended: next(queue, None)


def read(replies):
    answers = [Answer(reply) for reply in replies]
    for answer in answers:
        if answer.error:
            raise Failed(answer.error)
    return answers


def ask_alone(side, messages, max_tokens):
    """One request by itself."""
    reply = request(side, messages, max_tokens)
    Driver(side.port, 1, in_turn([reply])).run()
    return read([reply])[0]


def numbers(answers, seconds):
    ttfts = [a.ttft_ms for a in answers]
    tokens = sum(a.tokens for a in answers)
    return {"tok_s": tokens / seconds, "req_s": len(answers) / seconds,
            "ttft_p50": median(ttfts), "ttft_p95": quantile(ttfts, 0.95),
            "gap_p50": median([g for a in answers for g in a.gaps_ms()]),
            "output_tokens": tokens / len(answers),
            "prompt_tokens": median([a.prompt_tokens for a in answers])}


def closed_loop(side, work, seed):
    """A list of requests, work.clients of them at a time."""
    questions = Questions(work, seed)
    replies = [request(side, questions.messages(i), work.max_tokens)
               for i in range(work.requests)]
    return Driver(side.port, work.clients, in_turn(replies)), measured


def measured(driver):
    answers = read(driver.replies)
    return numbers(answers, max(a.ended for a in answers) - driver.started)


def conversations(side, work, seed):
    """Each client's next question has all that was said before it."""
    questions = Questions(work, seed)
    history = [[] for _ in range(work.clients)]
    turn = [0] * work.clients

    def next_reply(i, ended):
        if ended:
            history[i].append({"role": "assistant",
                               "content": read([ended])[0].text})
        if turn[i] == work.turns:
            return None
        messages = questions.messages(1000 * i + turn[i], history[i])
        history[i] = messages
        turn[i] += 1
        return request(side, messages, work.max_tokens)

    return Driver(side.port, work.clients, next_reply), measured


class Mixed:
    """Streams without end, and a long prompt every few seconds.  The run
    lasts until the first long prompt has its first token, at least."""

    def __init__(self, side, work, seed):
        self.side = side
        self.work = work
        self.questions = Questions(work, seed)
        self.n = self.n_long = 0
        # all texts are made before the clock runs
        self.longs = [request(side, self.questions.long_messages(i),
                              LONG_TOKENS, "long")
                      for i in range(int(work.duration_s / work.every_s) + 1)]

    def driver(self):
        return Driver(self.side.port, self.work.clients + 1, self._next,
                      self._timer)

    @staticmethod
    def measured(driver):
        answers = read(driver.replies)
        streams = [a for a in answers if a.kind == "stream"]
        longs = [a for a in answers if a.kind == "long" and a.arrivals]
        started = [a for a in streams if a.arrivals]
        gaps = [g for a in started for g in a.gaps_ms(
            None if a.ended else driver.stopped)]
        return {"tok_s": sum(a.tokens for a in started)
                / (driver.stopped - driver.started),
                "ttft_p50": median([a.ttft_ms for a in started]),
                "ttft_p95": quantile([a.ttft_ms for a in started], 0.95),
                "gap_p50": median(gaps), "gap_max": max(gaps),
                "long_ttft": median([a.ttft_ms for a in longs]),
                "long_tokens": median([a.prompt_tokens for a in longs
                                       if a.ended]),
                "long_prompts": len(longs)}

    def _next(self, i, ended):
        if i == self.work.clients:
            return None
        self.n += 1
        return request(self.side, self.questions.messages(self.n),
                       self.work.max_tokens)

    def _timer(self, driver):
        t = time.perf_counter() - driver.started
        long = driver.connections[-1]
        due = (self.n_long + 0.5) * self.work.every_s
        if t >= due and t < self.work.duration_s:
            # one that is not done by then is not joined by another
            if long.reply is None:
                driver.start(self.work.clients, self.longs[self.n_long])
            self.n_long += 1
        return t >= self.work.duration_s and any(
            r.kind == "long" and Answer(r).arrivals for r in driver.replies)


def mixed(side, work, seed):
    streams = Mixed(side, work, seed)
    return streams.driver(), streams.measured


# (side, work, seed): a driver, and what reads the numbers off it afterwards
KINDS = {"short": closed_loop, "shared": closed_loop, "tiny": closed_loop,
         "multiturn": conversations, "mixed": mixed}


def run(side, work, seed, watch):
    """The measures of one run; watch() notes who uses the processors."""
    questions = Questions(work, seed)
    driver, numbers_of = KINDS[work.kind](side, work, seed)
    found = {}
    if work.kind in ("shared", "tiny"):
        found["cold_ttft"] = ask_alone(side, questions.messages(-1),
                                       work.max_tokens).ttft_ms
    else:
        # whatever slept while another side was measured
        ask_alone(side, [{"role": "user", "content": f"Hello {seed}"}], 4)
    with watch(side.pids()) as used:
        driver.run()
    found.update(numbers_of(driver))
    if work.kind == "shared":
        found["hit"] = median([ask_alone(
            side, questions.messages(-2 - i), 1).ttft_ms
            for i in range(HITS)])
    found.update(used.result)
    return found


def run_other(generator, side, work, seed):
    """The same by another load generator, a program with these options that
    prints its results as JSON."""
    options = {"port": side.port, "model": side.model, "workload": work.kind,
               "conc": work.clients, "max-tokens": work.max_tokens,
               "seed": seed}
    if work.requests:
        options["requests"] = work.requests
    if work.kind != "tiny":
        options["prompt-words"] = work.words
    if work.system:
        options["system-words"] = work.system
    if work.kind == "multiturn":
        options["turns"] = work.turns
    if work.kind == "mixed":
        options.update({"long-words": work.long_words, "every": work.every_s,
                        # its run ends then, whatever is missing
                        "duration": 1.5 * work.duration_s,
                        "long-max-tokens": LONG_TOKENS})
    said = call(generator, options, side)
    found = {"tok_s": said["out_tok_s"], "req_s": said["req_s"],
             "ttft_p50": said["ttft_ms"]["p50"],
             "ttft_p95": said["ttft_ms"]["p95"],
             "gap_p50": said["itl_ms"]["p50"],
             "gap_max": said["itl_ms"]["max"],
             "cold_ttft": said.get("cold_ttft_ms"),
             "output_tokens": said["out_tok_avg"],
             "prompt_tokens": said["prompt_tok_avg"],
             "other_cores": said["other_cores"],
             "server_cores": said["server_cpu_s"] / said["wall_s"],
             "client_share": said["client_cpu_s"] / said["wall_s"]
             / len(os.sched_getaffinity(0))}
    if work.kind == "mixed":
        if not said["long"]["n"]:
            raise Failed("no long prompt was answered in time")
        found["long_ttft"] = said["long"]["ttft_p50_ms"]
        found["long_tokens"] = said["long"]["prompt_tok_avg"]
    if work.kind == "shared":
        options.update({"conc": 1, "requests": HITS, "max-tokens": 1,
                        "seed": seed + 500})
        found["hit"] = call(generator, options, side)["ttft_ms"]["p50"]
    return found


def call(generator, options, side):
    words = [generator]
    for name, value in options.items():
        words += [f"--{name}", str(value)]
    for pid in side.pids():
        words += ["--pid", str(pid)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Failed(done.stderr.strip()[-300:])
    return json.loads(done.stdout)

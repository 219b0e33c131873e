"""(b) Prefix caching on and off: hit rates, time to first token, its cost."""

import asyncio
import random

from article_load import (Agent, Conversation, cached_by_hand, completion, rag,
                          random_requests, random_tokens)
from article_server import Server, ask, closed_loop, median, quantile, spread

ENGINES = {"on": "prefix_caching on;", "off": "prefix_caching off;"}


class Tally:
    """What one workload showed: tokens, hits, time to first token."""

    def __init__(self, by_hand=None):
        self.prompt = 0
        self.cached = 0
        self.by_hand = by_hand
        self.ttft = {"on": [], "off": []}
        self.equal = True

    def add(self, both):
        on, off = both["on"], both["off"]
        self.prompt += on.usage["prompt_tokens"]
        self.cached += on.cached
        self.equal &= on.text == off.text and off.cached == 0
        for mode, stream in both.items():
            self.ttft[mode].append(stream.ttft)


async def ask_both(setup, server, request, i):
    return {mode: await ask(server.ports[mode], *request)
            for mode in setup.in_turn(ENGINES, i)}


async def run_rag(setup, server):
    rng = random.Random(f"{setup.seed} rag")
    sizes = {} if not setup.quick else {
        "n_system": 320, "n_document": 160, "n_question": 24}
    prompts = rag(rng, setup.scaled(4, 2), setup.scaled(6, 3, 2), **sizes)
    tally = Tally(sum(cached_by_hand(prompts)))
    for i, prompt in enumerate(prompts):
        tally.add(await ask_both(setup, server, completion(prompt, 16), i))
    return tally


async def run_talks(setup, server, talks, n_turns):
    """Turn by turn through all of them, so that each has to find its history
    again after the others."""
    tally = Tally()
    for i in range(n_turns * len(talks)):
        talk = talks[i % len(talks)]
        both = await ask_both(setup, server, talk.next_request(), i)
        talk.answer(both["on"].text)
        tally.add(both)
    return tally


async def run_chat(setup, server):
    talks = [Conversation(random.Random(setup.seed + i), 120, (10, 35), 60)
             for i in range(setup.scaled(4, 2, 1))]
    return await run_talks(setup, server, talks, setup.scaled(10, 4, 2))


async def run_agent(setup, server):
    talks = [Agent(random.Random(setup.seed + i), setup.scaled(500, 150),
                   (30, 130), 40) for i in range(setup.scaled(2, 2, 1))]
    return await run_talks(setup, server, talks, setup.scaled(14, 4, 2))


WORKLOADS = (("RAG", run_rag), ("multi-turn chat", run_chat),
             ("coding agent", run_agent))


def milliseconds(values):
    return "{:.0f} / {:.0f}".format(1000 * median(values),
                                    1000 * quantile(values, 0.95))


def prefix(setup):
    tallies, by_metrics = {}, {}
    with Server(setup, ENGINES) as server:
        for name, run in WORKLOADS:
            setup.say(f"(b) {name}")
            before = server.metrics("on")
            tallies[name] = asyncio.run(run(setup, server))
            after = server.metrics("on")
            hits, queries = (after[m] - before[m] for m in (
                "vllm:prefix_cache_hits_total",
                "vllm:prefix_cache_queries_total"))
            by_metrics[name] = hits / queries
        hit = asyncio.run(time_hit(setup, server))
    with Server(setup, touched(ENGINES)) as server:
        cost = asyncio.run(measure_cost(setup, server))
    return [report_rates(tallies, by_metrics), report_hit(hit),
            report_cost(cost)]


def report_rates(tallies, by_metrics):
    rows, rates = [], {}
    for name, t in tallies.items():
        rates[name] = t.cached / t.prompt
        cut = median(t.ttft["off"]) / median(t.ttft["on"])
        rows.append([
            name, len(t.ttft["on"]), t.prompt, t.cached,
            f"{100 * rates[name]:.1f} %", f"{100 * by_metrics[name]:.1f} %",
            t.by_hand if t.by_hand is not None else "—",
            milliseconds(t.ttft["on"]), milliseconds(t.ttft["off"]),
            f"{cut:.1f}×", "equal" if t.equal else "DIFFERENT"])
    names = list(tallies)
    return {
        "title": "(b) Prefix caching: hit rates and time to first token",
        "notes": ["Each request goes to an engine with and one without "
                  "prefix_caching, in turn. TTFT: median / 95th percentile. "
                  "By hand: what whole pages of common beginnings give."],
        "columns": ["workload", "requests", "prompt tokens", "cached",
                    "hit rate", "by metrics", "by hand", "TTFT on, ms",
                    "TTFT off, ms", "medians off / on", "answers"],
        "rows": rows,
        "bounds": [
            ("hit rate, all workloads", "≥ 75 %", ", ".join(
                f"{100 * r:.1f} %" for r in rates.values()),
             all(r >= 0.75 for r in rates.values())),
            ("hit rate, two of three", "≥ 90 %", ", ".join(
                f"{100 * r:.1f} %" for r in sorted(rates.values())[1:]),
             sum(r >= 0.9 for r in rates.values()) >= 2)],
        "data": {"workloads": {name: {
            "prompt_tokens": t.prompt, "cached_tokens": t.cached,
            "by_hand": t.by_hand, "by_metrics": by_metrics[name],
            "equal": t.equal, "ttft_s": t.ttft}
            for name, t in tallies.items()}},
        "plots": [
            ("prefix-hits", "bars", {
                "title": "Prefix cache hit rate", "y": "% of prompt tokens",
                "groups": names,
                "series": [("hit rate", [100 * rates[n] for n in names])]}),
            ("prefix-ttft", "bars", {
                "title": "Median time to first token", "y": "milliseconds",
                "groups": names, "series": [
                    (f"caching {mode}",
                     [1000 * median(tallies[n].ttft[mode]) for n in names])
                    for mode in ("off", "on")]})],
    }


async def time_hit(setup, server):
    """A prompt of 1 000 tokens and a question: cold, and found again."""
    rng = random.Random(f"{setup.seed} hit")
    port = server.ports["on"]
    n = setup.scaled(1000, 320)
    shared = random_tokens(rng, n)
    times = {"miss": [], "hit": []}
    setup.say("(b) TTFT of a hit")
    await ask(port, *completion(shared + random_tokens(rng, 24), 2))
    for _ in range(setup.scaled(15, 5, 2)):
        for kind in times:
            begin = shared if kind == "hit" else random_tokens(rng, n)
            stream = await ask(port, *completion(
                begin + random_tokens(rng, 24), 2))
            times[kind].append(stream.ttft)
            assert stream.cached == (n // 16 * 16 if kind == "hit" else 0)
    return {"tokens": n, **times}


def report_hit(hit):
    n = hit["tokens"]
    miss, found = spread(hit["miss"]), spread(hit["hit"])
    ratios = spread([h / m for h, m in zip(hit["hit"], hit["miss"])])
    return {
        "title": f"(b) A prompt of {n} + 24 tokens, {n // 16 * 16} of them "
                 "cached",
        "notes": [f"{len(hit['hit'])} repetitions in turn; min / median / "
                  "max."],
        "columns": ["", "TTFT, ms"],
        "rows": [["miss", "{:.1f} / {:.1f} / {:.1f}".format(
            *(1000 * v for v in miss))],
            ["hit", "{:.1f} / {:.1f} / {:.1f}".format(
                *(1000 * v for v in found))],
            ["hit / miss", "{:.3f} / {:.3f} / {:.3f}".format(*ratios)]],
        "bounds": [(f"TTFT at a {n}-token hit / miss, medians", "≤ 0.125",
                    f"{found[1] / miss[1]:.3f}", found[1] <= miss[1] / 8)],
        "data": hit, "plots": [],
    }


def touched(engines):
    """Engines with few pages, all in memory from the start: a cache that grows
    takes one page after another from the kernel, which is not what is asked."""
    return {name: options + "kv_cache_memory 256m; kv_cache_prefault on; "
            for name, options in engines.items()}


async def measure_cost(setup, server):
    """Throughput of random prompts, which are never found."""
    n, clients = setup.scaled(16, 8, 4), 8
    lengths = [(setup.scaled(256, 64), 16)] * n
    speeds = {"on": [], "off": []}
    for i in range(-1, setup.scaled(15, 3, 1)):
        if i >= 0:
            setup.say(f"(b) cost at zero hits, pair {i + 1}")
        requests = random_requests(
            random.Random(f"{setup.seed} cost {i}"), lengths)
        for mode in setup.in_turn(ENGINES, i):
            ended = await closed_loop(server.ports[mode], clients, requests)
            seconds = max(s.ended for s in ended) - min(
                s.started for s in ended)
            assert not any(s.cached for s in ended)
            if i >= 0:      # the first pair warms up
                speeds[mode].append(sum(sum(length) for length in lengths)
                                    / seconds)
    return speeds


def report_cost(speeds):
    ratios = spread([a / b for a, b in zip(speeds["on"], speeds["off"])])
    return {
        "title": "(b) What prefix caching costs when nothing is found",
        "notes": [f"Random prompts, 8 clients, {len(speeds['on'])} pairs in "
                  "turn; prompt and answer tokens in a second, min / median / "
                  "max. 256 MiB of KV cache, prefaulted."],
        "columns": ["prefix_caching", "tok/s"],
        "rows": [[mode, "{:.0f} / {:.0f} / {:.0f}".format(*spread(s))]
                 for mode, s in speeds.items()]
        + [["on / off", "{:.3f} / {:.3f} / {:.3f}".format(*ratios)]],
        "bounds": [("throughput with / without caching, zero hits", "> 0.99",
                    f"{ratios[1]:.3f}", ratios[1] > 0.99)],
        "data": speeds, "plots": [],
    }

"""Latency: (c) chunked prefill under running streams, (d) many users."""

import asyncio
import random
import time

from article_load import (chat, completion, random_requests, random_tokens,
                          sentence)
from article_server import (Server, closed_loop, fetch_metrics, median,
                            open_stream, quantile, spread)

STREAMS = 8
OFF = "chunking off"
ON = "chunking on"          # all defaults
SMOOTH = "chunking on, inter_token_target 15ms"

# with chunking: what is set beside the defaults
MODES = {
    ON: "",
    SMOOTH: "inter_token_target 15ms;",
    "chunking on, no target": "inter_token_target 0;",
    "chunking on, no target, budget 32":
        "inter_token_target 0; max_num_batched_tokens 32;",
}


def chunking_engines(n_long, names):
    room = n_long + 608
    common = f"max_model_len {room}; max_num_seqs 12; prefix_caching off; "
    options = dict(MODES)
    options[OFF] = f"chunked_prefill off; max_num_batched_tokens {room};"
    return {block_name(n): common + options[n] for n in names}


def block_name(name):
    """The name of an llm_engine: letters, digits, no blanks."""
    return name.replace(",", "").replace(" ", "_")


async def idle(port, block):
    while True:
        m = await fetch_metrics(port, block)
        if not m["vllm:num_requests_running"] + m["vllm:num_requests_waiting"]:
            return
        await asyncio.sleep(0.02)


async def until(condition, seconds=120):
    end = time.perf_counter() + seconds
    while not condition():
        if time.perf_counter() > end:
            raise RuntimeError("nothing happens")
        await asyncio.sleep(0.005)


def gaps_within(stream, start, end):
    """(when, seconds) of gaps between tokens that overlap start … end."""
    at = [t for t, _ in stream.arrivals]
    return [(b, b - a) for a, b in zip(at, at[1:]) if b > start and a < end]


async def disturb(server, block, rng, n_long, calm_s):
    """Streams that decode, and a long prompt that arrives among them."""
    port = server.ports[block]
    streams = [await open_stream(port, *completion(random_tokens(rng, 32), 3000
                                                   if n_long > 2000 else 500))
               for _ in range(STREAMS)]
    await until(lambda: all(s.tokens >= 20 for s in streams))
    calm = time.perf_counter()
    await asyncio.sleep(calm_s)
    arrival = time.perf_counter()
    long = await open_stream(port, *completion(random_tokens(rng, n_long), 4))
    await until(lambda: long.tokens >= 1)
    end = long.arrivals[0][0]
    await until(lambda: all(s.arrivals[-1][0] > end for s in streams))
    for stream in [*streams, long]:
        stream.transport.abort()
    await idle(port, block)
    before = [g for s in streams for _, g in gaps_within(s, calm, arrival)]
    during = [g for s in streams for g in gaps_within(s, arrival, end)]
    tokens = sum(n for s in streams for _, n in steps(s, arrival, end))
    return {
        "before": median(before),
        "before_worst": max(before),
        "median": median([g for _, g in during]),
        "p99": quantile([g for _, g in during], 0.99),
        "worst": max(g for _, g in during),
        "ttft": end - long.started,
        "stream_tokens_s": tokens / (end - arrival),
        # each gap as a level, as long as it lasted
        "trace": [(t - since - arrival, 1000 * g) for t, g in
                  gaps_within(streams[0], calm, end) for since in (g, 0)],
    }


def steps(stream, start, end):
    """(time, tokens) of the events within start … end."""
    last = 0
    for t, n in stream.arrivals:
        if start <= t <= end:
            yield t, n - last
        last = n


def mixed_load(rng, quick):
    """Short chats with long prompts among them.  Many, so that who ends last
    weighs little; a long prompt in each quarter, none at its end."""
    lengths = []
    for _ in range(1 if quick else 4):
        part = [(64, 48)] * (8 if quick else 24)
        for _ in range(1 if quick else 2):
            part.insert(rng.randrange(len(part) * 3 // 4),
                        (400 if quick else 2000, 16))
        lengths += part
    return random_requests(rng, lengths), sum(map(sum, lengths))


async def throughput(server, block, requests, n_tokens):
    ended = await closed_loop(server.ports[block], STREAMS + 2, requests)
    return n_tokens / (max(s.ended for s in ended)
                       - min(s.started for s in ended))


def chunking(setup):
    names = [OFF, *MODES] if not setup.quick else [OFF, ON, SMOOTH]
    n_long = setup.scaled(4000, 800, 200)
    engines = chunking_engines(n_long, names)
    gaps = {name: [] for name in names}
    speeds = {name: [] for name in (OFF, ON, SMOOTH)}
    with Server(setup, engines) as server:
        for i in range(setup.scaled(5, 2, 1)):
            for name in setup.in_turn(names, i):
                setup.say(f"(c) {name}, round {i + 1}")
                gaps[name].append(asyncio.run(disturb(
                    server, block_name(name), random.Random(
                        f"{setup.seed} long {i}"), n_long,
                    setup.scaled(0.6, 0.3))))
        for i in range(setup.scaled(7, 2, 1)):
            setup.say(f"(c) throughput, round {i + 1}")
            requests, n_tokens = mixed_load(
                random.Random(f"{setup.seed} mixed {i}"), setup.quick)
            for name in setup.in_turn(speeds, i):
                speeds[name].append(asyncio.run(throughput(
                    server, block_name(name), requests, n_tokens)))
    return [report_gaps(n_long, gaps), report_speeds(speeds)]


def report_gaps(n_long, gaps):
    rows, ratios = [], {}
    for name, runs in gaps.items():
        to_calm = spread([r["worst"] / r["before"] for r in runs])
        to_own = spread([r["worst"] / r["median"] for r in runs])
        ratios[name] = (to_own, to_calm)
        ms = {k: 1000 * median([r[k] for r in runs])
              for k in ("before", "median", "p99", "worst", "ttft")}
        rows.append([name, f"{ms['before']:.1f}", f"{ms['median']:.1f}",
                     f"{ms['p99']:.1f}", f"{ms['worst']:.1f}",
                     "{:.1f} / {:.1f} / {:.1f}".format(*to_own),
                     "{:.1f} / {:.1f} / {:.1f}".format(*to_calm),
                     f"{ms['ttft']:.0f}",
                     f"{median([r['stream_tokens_s'] for r in runs]):.0f}"])
    what = f"worst gap, {n_long}-token prompt arriving, {{}}: over the median"
    bounds = []
    for name in (ON, SMOOTH, OFF):
        for ratio, of in zip(ratios[name], ("", " before it")):
            bounds.append((what.format(name) + of,
                           "≤ 2.5" if name != OFF else "(shown)",
                           f"{ratio[1]:.2f}",
                           ratio[1] <= 2.5 if name != OFF else None))
    return {
        "title": f"(c) {STREAMS} streams while a prompt of {n_long} tokens "
                 "arrives",
        "notes": [f"Gaps between tokens in ms, medians of "
                  f"{len(gaps[OFF])} runs in turn: before the prompt, and while "
                  "it is computed. Worst gap over the median while the prompt "
                  "is there, and over the median before: min / median / max. "
                  "TTFT of the prompt in ms, tokens in a second of the "
                  "streams meanwhile. Budget: max_num_batched_tokens."],
        "columns": ["mode", "median before", "median", "p99", "worst",
                    "worst / median", "worst / before", "TTFT",
                    "streams, tok/s"],
        "rows": rows,
        "bounds": bounds,
        "data": {name: [{k: v for k, v in r.items() if k != "trace"}
                        for r in runs] for name, runs in gaps.items()},
        "plots": [("chunking-gaps", "line", {
            "title": f"One of {STREAMS} streams; a prompt of {n_long} tokens "
                     "arrives at 0 s",
            "x": "seconds", "y": "ms between tokens", "log": True,
            "series": [(name, gaps[name][0]["trace"])
                       for name in (OFF, ON, SMOOTH)]})],
    }


def report_speeds(speeds):
    rows = [[name, "{:.0f} / {:.0f} / {:.0f}".format(*spread(values)),
             "{:.3f} / {:.3f} / {:.3f}".format(*spread(
                 [a / b for a, b in zip(values, speeds[OFF])]))]
            for name, values in speeds.items()]
    ratio = median([a / b for a, b in zip(speeds[ON], speeds[OFF])])
    smooth = median([a / b for a, b in zip(speeds[SMOOTH], speeds[OFF])])
    return {
        "title": "(c) Throughput of short chats with long prompts among them",
        "notes": [f"{STREAMS + 2} clients, {len(speeds[OFF])} runs in turn; "
                  "prompt and answer tokens in a second, min / median / max."],
        "columns": ["mode", "tok/s", "over " + OFF],
        "rows": rows,
        "bounds": [
            (f"throughput, {ON} / off", "≥ 1", f"{ratio:.3f}", ratio >= 1),
            (f"throughput, {SMOOTH} / off", "(shown)", f"{smooth:.3f}", None)],
        "data": speeds, "plots": [],
    }


def users(setup):
    """(d): a closed loop of users, each with one chat request after another."""
    rows, data = [], {}
    counts = setup.scaled((1, 10, 100), (1, 4, 12), (1, 4))
    with Server(setup, {"chat": "slots 512;"}) as server:
        for n in counts:
            setup.say(f"(d) {n} users")
            rng = random.Random(f"{setup.seed} users {n}")
            requests = [chat([
                {"role": "system", "content": "You answer visitors of a "
                 "library in one short sentence."},
                {"role": "user", "content": sentence(rng, rng.randint(8, 60))}],
                48, exact=True)
                for _ in range(max(n * 2, setup.scaled(20, 6, 2)))]
            start = time.perf_counter()
            ended = asyncio.run(closed_loop(server.ports["chat"], n, requests))
            seconds = time.perf_counter() - start
            ttft = [s.ttft for s in ended]
            gaps = [g for s in ended for g in s.gaps()]
            data[n] = {"ttft_s": ttft, "tokens_s": sum(
                s.tokens for s in ended) / seconds, "gap_s": median(gaps)}
            rows.append([
                n, len(ended), *("{:.0f} / {:.0f}".format(
                    1000 * median(v), 1000 * quantile(v, 0.95))
                    for v in (ttft, gaps)), f"{data[n]['tokens_s']:.0f}",
                f"{data[n]['tokens_s'] / n:.1f}"])
    return {
        "title": "(d) Users, each with one request after another",
        "notes": ["Chats with answers of 48 tokens. TTFT and gaps between "
                  "tokens: median / 95th percentile."],
        "columns": ["users", "requests", "TTFT, ms", "gaps, ms", "tok/s",
                    "tok/s each"],
        "rows": rows, "bounds": [], "data": data,
        "plots": [("users", "bars", {
            "title": "Answer tokens in a second, all users together",
            "y": "tok/s", "groups": [f"{n} user" + "s" * (n > 1) for n in counts],
            "series": [("tok/s", [data[n]["tokens_s"] for n in counts])]}),
            ("users-ttft", "bars", {
                "title": "Median time to first token and between tokens",
                "y": "milliseconds", "log": True,
                "groups": [f"{n} user" + "s" * (n > 1) for n in counts],
                "series": [
                    ("first token",
                     [1000 * median(data[n]["ttft_s"]) for n in counts]),
                    ("between tokens",
                     [1000 * data[n]["gap_s"] for n in counts])]})],
    }

"""Memory: (a) paging against reservation, (e) gpu_memory_utilization.

Both read the number of pages from /metrics; waste is counted twice, by the
engine and by what the clients know.
"""

import asyncio
import random
import time

from article_load import (completion, draw_lengths, random_requests,
                          random_tokens)
from article_server import (Server, closed_loop, fetch_metrics, median,
                            quantile, spread)

PAGE = 16
MAX_LEN = 2048
SEATS = 3                    # whole reservations that the KV budget has
TOKEN_BYTES = 30 * 2 * 3 * 64 * 2   # layers, K and V, heads, head, f16


class Watch:
    """Samples an engine while streams run: what it holds, and how much of it
    the clients know to be tokens."""

    def __init__(self, port, engine):
        self.port = port
        self.engine = engine
        self.live = set()
        self.samples = []
        self.task = asyncio.create_task(self._run())

    def on_tokens(self, stream):
        self.live.add(stream)

    async def _run(self):
        start = time.perf_counter()
        while True:
            m = await fetch_metrics(self.port, self.engine)
            self.live = {s for s in self.live if not s.done.done()}
            self.samples.append({
                "t": time.perf_counter() - start,
                "running": m["vllm:num_requests_running"],
                "waiting": m["vllm:num_requests_waiting"],
                "pages": m["llm_kv_pages_used"],
                "waste": self._waste(m),
                "engine_waste": engine_waste(m),
            })
            await asyncio.sleep(0.1)

    def _waste(self, m):
        """Unused slots / slots held, when all that run are known: in the step
        that admits a prompt its pages are held and its tokens not yet there.
        The newest token has no K and V yet."""
        if not m["llm_kv_pages_used"] or len(self.live) != int(
                m["vllm:num_requests_running"]):
            return None
        used = sum(s.n_prompt + s.tokens - 1 for s in self.live)
        return max(0.0, 1 - used / (PAGE * m["llm_kv_pages_used"]))

    async def stop(self):
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        return self.samples


def engine_waste(m):
    """The engine's own account, if it keeps one."""
    held = m.get("llm_kv_slots_held")
    return 1 - m["llm_kv_slots_used"] / held if held else None


def kv_pages(m):
    """Pages of the pool, by either name."""
    return m.get("llm_kv_pages") or m["llm_kv_pages_total"]


def mean(values):
    values = [v for v in values if v is not None]
    return sum(values) / len(values) if values else float("nan")


async def burst(server, mode, requests):
    """All requests at once; the numbers of one run."""
    port = server.ports[mode]
    before = server.metrics(mode)
    watch = Watch(port, mode)
    start = time.perf_counter()
    ended = await closed_loop(port, len(requests), requests, watch.on_tokens)
    seconds = time.perf_counter() - start
    samples = await watch.stop()
    full = [s for s in samples if s["waiting"]] or samples
    return {
        "tokens_s": sum(s.tokens for s in ended) / seconds,
        "waste": mean(s["waste"] for s in samples),
        "engine_waste": mean(s["engine_waste"] for s in samples),
        "mean_running": mean(s["running"] for s in full),
        "max_running": max(s["running"] for s in samples),
        "preemptions": server.metrics(mode)["vllm:num_preemptions_total"]
        - before["vllm:num_preemptions_total"],
        "samples": samples,
        "answers": [s.text for s in ended],
    }


def paging(setup):
    """(a): equal requests, equal memory, pages as needed or max_model_len."""
    rounds = setup.scaled(5, 1)
    common = (f"max_model_len {MAX_LEN}; kv_cache_memory "
              f"{SEATS * MAX_LEN * TOKEN_BYTES}; ")
    engines = {"paging": common, "reservation": common + "reservation on;"}
    counts = {"ShareGPT": setup.scaled(20, 10, 6),
              "Alpaca": setup.scaled(64, 24, 10)}
    runs = {(name, mode): [] for name in counts for mode in engines}

    with Server(setup, engines) as server:
        pages = int(kv_pages(server.metrics("paging")))
        for name, n in counts.items():
            for i in range(rounds):
                rng = random.Random(setup.seed + i)
                lengths = draw_lengths(rng, name, n,
                                       setup.scaled(1, 0.3, 0.2))
                requests = random_requests(rng, lengths)
                for mode in setup.in_turn(engines, i):
                    setup.say(f"(a) {name}, {mode}, round {i + 1}")
                    runs[name, mode].append(
                        asyncio.run(burst(server, mode, requests)))
    return report_paging(setup, pages, counts, runs)


def report_paging(setup, pages, counts, runs):
    rows = []
    equal = all(p["answers"] == r["answers"] for name in counts
                for p, r in zip(runs[name, "paging"],
                                runs[name, "reservation"]))
    for (name, mode), all_runs in runs.items():
        speed = spread([r["tokens_s"] for r in all_runs])
        engine = mean(r["engine_waste"] for r in all_runs)
        rows.append([
            name, mode, counts[name],
            f"{100 * mean(r['waste'] for r in all_runs):.1f} %",
            f"{100 * engine:.1f} %" if engine == engine else "—",
            f"{mean(r['mean_running'] for r in all_runs):.1f}",
            f"{max(r['max_running'] for r in all_runs):.0f}",
            f"{sum(r['preemptions'] for r in all_runs):.0f}",
            "{:.0f} / {:.0f} / {:.0f}".format(*speed)])

    def of(name, mode, key):
        return mean(r[key] for r in runs[name, mode])

    share = {mode: of("ShareGPT", mode, "waste")
             for mode in ("paging", "reservation")}
    more = (of("ShareGPT", "paging", "mean_running")
            / of("ShareGPT", "reservation", "mean_running"))
    faster = {name: spread([p["tokens_s"] / r["tokens_s"] for p, r in zip(
        runs[name, "paging"], runs[name, "reservation"])]) for name in counts}
    return {
        "title": "(a) Paging against reservation",
        "notes": [
            f"{pages:.0f} pages of {PAGE} tokens ({SEATS} × max_model_len "
            f"{MAX_LEN}); all requests at once. Requests at once: mean while "
            "some wait, and maximum. tok/s: min / median / max of "
            f"{len(runs['ShareGPT', 'paging'])} runs in turn.",
            "Paging / reservation, tok/s of the pairs: " + "; ".join(
                "{} {:.2f} / {:.2f} / {:.2f}".format(name, *f)
                for name, f in faster.items()) + ". The answers are "
            + ("equal." if equal else "DIFFERENT.")],
        "columns": ["lengths", "mode", "requests", "KV waste", "by the engine",
                    "at once", "at most", "preempted", "tok/s"],
        "rows": rows,
        "bounds": [
            ("KV waste of paging, ShareGPT lengths", "< 4 %",
             f"{100 * share['paging']:.1f} %", share["paging"] < 0.04),
            ("requests at once, paging / reservation", "≥ 2",
             f"{more:.1f}", more >= 2)],
        "data": {"pages": pages, "faster": faster, "equal": equal, "runs": [
            {"lengths": name, "mode": mode, "runs": [
                {k: v for k, v in r.items() if k not in (
                    "samples", "answers")} for r in rs]}
            for (name, mode), rs in runs.items()]},
        "plots": [
            ("paging-running", "line", {
                "title": f"Requests at once in {pages:.0f} KV pages, "
                         "ShareGPT lengths",
                "x": "seconds", "y": "requests running",
                "series": [(mode, [(s["t"], s["running"]) for s in
                                   runs["ShareGPT", mode][0]["samples"]])
                           for mode in ("paging", "reservation")]}),
            ("paging-waste", "bars", {
                "title": "KV slots that stay empty",
                "y": "% of the slots held", "groups": list(counts),
                "series": [(mode, [100 * of(name, mode, "waste")
                                   for name in counts])
                           for mode in ("paging", "reservation")]})],
    }


SHARES = (0.8, 0.9, 0.95)
BASE = 480 << 20             # memory that the engine may use in (e)


async def hold(server, n, length):
    """n requests of that length together, all of them to the end."""
    rng = random.Random(n)
    answer = 32
    requests = [completion(random_tokens(rng, length - answer), answer)
                for _ in range(n)]
    watch = Watch(server.ports["chat"], "chat")
    ended = await closed_loop(server.ports["chat"], n, requests)
    samples = await watch.stop()
    return (max(s["running"] for s in samples),
            sum(s.tokens == answer for s in ended))


def address_space(setup, options):
    """A limit that leaves BASE for private memory: the segment that is shared
    with nginx and mapped files take address space, too."""
    with Server(setup, {"chat": options + "kv_cache_memory 64m;"}) as server:
        m = server.engine_memory()
    return m["VmSize"] - m["VmData"] + BASE


def utilization(setup):
    """(e): as many whole contexts as the start-up log promises, all at once."""
    rows, held = [], []
    length = setup.scaled(512, 128)
    options = (f"max_model_len {length}; max_num_seqs 128; slots 128; "
               "max_num_batched_tokens 512; prefix_caching off; ")
    limit = address_space(setup, options)
    for share in setup.scaled(SHARES, SHARES, (0.8, 0.95)):
        setup.say(f"(e) gpu_memory_utilization {share}")
        with Server(setup, {"chat": options + "kv_cache_prefault on; "
                            f"gpu_memory_utilization {share};"},
                    limit) as server:
            pages = int(kv_pages(server.metrics("chat")))
            fit = min(pages // (length // PAGE), 128)
            n = setup.scaled(fit, min(fit, 8), 4)
            running, whole = asyncio.run(hold(server, n, length))
            m = server.metrics("chat")
            resident = server.engine_memory()["RssAnon"]
        preempted = int(m["vllm:num_preemptions_total"])
        alive = m["llm_engine_up"] == 1 and m["llm_engine_epoch"] == 1
        held.append((share, fit, n, whole, preempted, alive))
        rows.append([f"{share:.2f}", pages, fit, f"{whole} of {n}",
                     f"{running:.0f}", preempted,
                     f"{resident / 2**20:.0f} MiB", "no" if alive else "yes"])
    good = all(whole == n and not preempted and alive
               for _, _, n, whole, preempted, alive in held)
    return {
        "title": "(e) gpu_memory_utilization",
        "notes": [f"The engine may use {BASE >> 20} MiB of private memory "
                  f"(RLIMIT_AS), every page touched at start. Requests of "
                  f"{length} tokens each, max_model_len {length}: as many at "
                  "once as the pages hold."
                  + (" (Quick: a few.)" if setup.quick else "")],
        "columns": ["utilization", "pages", "fit", "answered", "at once",
                    "preempted", "resident", "crashed"],
        "rows": rows,
        "bounds": [("requests held at each utilization, no out of memory",
                    "all", ", ".join(f"{h[3]} of {h[2]}" for h in held), good)],
        "data": {"held": held},
        "plots": [("utilization", "bars", {
            "title": f"Requests of {length} tokens held at once in "
                     f"{BASE >> 20} MiB",
            "y": "requests", "groups": [f"{h[0]:.2f}" for h in held],
            "series": [("fit", [h[1] for h in held])]})],
    }

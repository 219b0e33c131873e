#!/usr/bin/env python3
"""Our server against llama.cpp's and against OpenVINO GenAI.

    make bench-peer PEER=DIR [OPENVINO=PYTHON] [LOAD=PROGRAM], or, built:
    t/bench/peer.py --model FILE --peer DIR [--openvino PYTHON] [--quick]

PEER: a folder with llama-server and llama-bench.  OPENVINO: a Python that has
openvino_genai.  LOAD: another load generator than the one here.

All sides answer the same workloads with the same seeds in turn, in one window;
who isn't asked is stopped.  Each run waits for an idle second, and is repeated
if others used the processors meanwhile.  Prints the ratios and whether they
are what is wanted; writes peer.md and peer.json into the folder.  The exit
status says only whether everything ran.
"""

import argparse
import json
import os
import shutil
import signal
import sys
import time

import peer_load
from article import machine, plain
from peer_client import Failed
from peer_noise import LIMIT_CORES, Watch, wait_idle
from peer_sides import Llama, OpenVino, Ours
from peer_table import texts, worth_another_round
from peer_work import plan

TOP = os.path.abspath(os.path.join(os.path.dirname(__file__), "..", ".."))
ROUNDS = {"full": 5, "quick": 1, "tiny": 2}
PROBE_ROUNDS = 2
ATTEMPTS = 3


class Setup:
    """What the sides need to know."""

    def __init__(self, args):
        self.build = os.path.abspath(args.build)
        self.model = os.path.abspath(args.model)
        self.nginx = os.environ.get("TEST_NGINX_BINARY", "/usr/sbin/nginx")
        self.out = args.out
        self.peer = os.path.abspath(args.peer)
        self.openvino = args.openvino
        self.cpus = len(os.sched_getaffinity(0))


class Contest:
    """The sides, and the runs so far."""

    def __init__(self, args):
        self.args = args
        self.mode = args.mode
        self.setup = Setup(args)
        self.runs = []
        self.wanted = set(args.only.split(",")) if args.only else None
        self.works = [work for work in plan(self.mode, self.setup.cpus)
                      if not self.wanted or self.wanted & {
                          work.name, work.name.partition("-")[0]}]
        self.sides = {"ours": Ours(self.setup, args.engine)}

    def side(self, key):
        """key: ours, (L, flags) or (O, options, threads)."""
        if key not in self.sides:
            family, *rest = key
            self.sides[key] = (Llama if family == "L" else OpenVino)(
                self.setup, *rest)
        return self.sides[key]

    def keys(self, work):
        threads = work.threads or self.setup.cpus
        return ["ours", *(("L", flags) for flags in work.llama),
                *(("O", options, threads) for options in work.openvino
                  if self.setup.openvino)]

    def run(self):
        try:
            for i, work in enumerate(self.works):
                self._work(work)
                later = {key for w in self.works[i + 1:]
                         for key in self.keys(w)}
                for key in set(self.sides) - later:
                    self.sides.pop(key).stop()
                self.save()
        finally:
            for side in self.sides.values():
                side.stop()

    def _work(self, work):
        keys = self.keys(work)
        for i in range(self.args.rounds or ROUNDS[self.mode]):
            if i == PROBE_ROUNDS:
                keys = [key for key in keys if key == "ours"
                        or worth_another_round(
                            self.runs, work.name, self.side(key).name,
                            key[0])]
            # the order changes from round to round
            for key in keys if i % 2 == 0 else keys[::-1]:
                self._turn(work, self.side(key), i)

    def _turn(self, work, side, i):
        """One run, again if it was disturbed."""
        seed = self.args.seed * 1000 + i
        for attempt in range(ATTEMPTS):
            found = self._try(work, side, seed)
            found["noisy"] = (found.get("other_cores") or 0) > LIMIT_CORES
            if not found["noisy"] or self.mode == "tiny":
                break
            say(f"{work.name}, {side.name}: others took "
                f"{found['other_cores']:.2f} cores")
            # what has been asked once may be cached
            seed += 100
        self.runs.append({"work": work.name, "side": side.name,
                          "family": side.family, "round": i, "seed": seed,
                          "attempts": attempt + 1, "measures": plain(found)})
        shown = {k: round(v, 3) for k, v in found.items() if k in (
            "tok_s", "req_s", "ttft_p95", "failed") or " " in k
            if not isinstance(v, str)}
        say(f"{work.name}, {side.name}, round {i + 1}: {shown}")

    def _try(self, work, side, seed):
        program = work.kind == "bench" and side.family != "O"
        try:
            if not program and not side.running:
                say(f"starting {side.name}")
                side.start()
            elif not program:
                side.resume()
            if self.mode != "tiny":
                wait_idle()
            return self._measure(work, side, seed)
        except (Failed, ValueError) as problem:
            say(f"{work.name}, {side.name}: {problem}")
            # nobody knows what it still does: another one next time
            side.stop()
            return {"failed": str(problem)}
        finally:
            side.pause()

    def _measure(self, work, side, seed):
        if work.kind == "bench":
            return side.bench(work, seed, Watch)
        if side.family == "O":
            return side.batches(work, seed, Watch)
        if self.args.load:
            return peer_load.run_other(self.args.load, side, work, seed)
        return peer_load.run(side, work, seed, Watch)

    def save(self):
        with open(f"{self.args.out}/peer.json", "w", encoding="utf-8") as f:
            json.dump({"machine": self.args.host, "runs": self.runs}, f,
                      indent=1)


def say(text):
    print(f"# {text}", file=sys.stderr, flush=True)


def show(host, runs, out):
    title = (f"Commit {host['commit']}, {host['cpus']} CPUs ({host['cpu']}), "
             f"{os.path.basename(host['model'])}, {host['date']} UTC"
             + (f", {host['mode']}" if host["mode"] != "full" else "") + ".")
    text, marked = texts(runs, title)
    print(text)
    with open(f"{out}/peer.md", "w", encoding="utf-8") as f:
        f.write(marked)


def arguments():
    env = os.environ.get
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default=env("LLM_TEST_MODEL"))
    parser.add_argument("--build", default=env(
        "LLM_TEST_BUILD", os.path.join(TOP, "build")))
    parser.add_argument("--out", default=env("OUT") or os.path.join(
        TOP, "build", "bench-peer"))
    parser.add_argument("--peer", default=env("PEER"),
                        help="folder of llama-server and llama-bench")
    parser.add_argument("--openvino", default=env("OPENVINO"),
                        help="a Python that has openvino_genai")
    parser.add_argument("--load", default=env("LOAD"),
                        help="another load generator")
    parser.add_argument("--engine", default="",
                        help="more directives for our llm_engine block")
    parser.add_argument("--only", help="workloads, separated by commas: short "
                        "or short-16, shared, multiturn, mixed, tiny, "
                        "prefill, decode")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--quick", action="store_const", dest="mode",
                        const="quick", default="full", help="three minutes")
    parser.add_argument("--tiny", action="store_const", dest="mode",
                        const="tiny", help="only to see that it works")
    parser.add_argument("--show", metavar="peer.json",
                        help="the table of runs that were saved")
    args = parser.parse_args()
    if not args.show and not (args.model and args.peer):
        parser.error("give --model and --peer, or LLM_TEST_MODEL and PEER in "
                     "the environment")
    for program in ([] if args.show else [
            f"{args.peer}/llama-server", f"{args.peer}/llama-bench",
            args.openvino, args.load]):
        if program and not shutil.which(program):
            parser.error(f"there is no program {program}")
    return args


def main():
    args = arguments()
    os.makedirs(args.out, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    if args.show:
        with open(args.show, encoding="utf-8") as f:
            saved = json.load(f)
        show(saved["machine"], saved["runs"], args.out)
        return
    start = time.monotonic()
    args.host = dict(machine(), mode=args.mode, model=args.model,
                     seed=args.seed)
    contest = Contest(args)
    contest.run()
    show(args.host, contest.runs, args.out)
    print(f"\n{time.monotonic() - start:.0f} s; peer.md and peer.json are in "
          f"{args.out}")
    sys.exit(any(r["measures"].get("failed") for r in contest.runs))


if __name__ == "__main__":
    main()

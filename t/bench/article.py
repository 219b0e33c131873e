#!/usr/bin/env python3
"""The article's table, measured on a real model through NGINX.

    make bench-article            or, with everything built:
    t/bench/article.py --model FILE [--quick] [--only a,c] [--out DIR]

Prints one table for each claim and a last one with the bounds; writes them as
article.md and article.json with plots (SVG) into the folder.  Settings that
are compared run in turn, each in its own engine behind one nginx.  Nothing is
judged here: the exit status says only whether everything ran.

Parts: (a) paging against reservation, (b) prefix caching, (c) chunked prefill,
(d) users, (e) memory utilization.
"""

import argparse
import json
import os
import subprocess
import sys
import time

from article_latency import chunking, users
from article_memory import paging, utilization
from article_plot import KINDS
from article_prefix import prefix

TOP = os.path.abspath(os.path.join(os.path.dirname(__file__), "..", ".."))
PARTS = {"a": paging, "b": prefix, "c": chunking, "d": users,
         "e": utilization}


class Setup:
    """What the parts need to know."""

    def __init__(self, args):
        self.build = os.path.abspath(args.build)
        self.model = os.path.abspath(args.model)
        self.nginx = os.environ.get("TEST_NGINX_BINARY", "/usr/sbin/nginx")
        self.tiny = args.tiny
        self.quick = args.quick or args.tiny
        self.seed = args.seed

    def scaled(self, full, quick, tiny=None):
        if self.tiny and tiny is not None:
            return tiny
        return quick if self.quick else full

    @staticmethod
    def in_turn(names, i):
        """The settings in an order that changes from round to round."""
        names = list(names)
        return names if i % 2 == 0 else names[::-1]

    @staticmethod
    def say(text):
        print(f"# {text}", file=sys.stderr, flush=True)


def command(*words):
    try:
        return subprocess.run(words, cwd=TOP, capture_output=True, text=True,
                              check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def machine():
    model = ""
    with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as f:
        for line in f:
            if line.startswith("model name"):
                model = line.split(":", 1)[1].strip()
                break
    return {"commit": command("git", "rev-parse", "--short", "HEAD") or "none",
            "cpus": len(os.sched_getaffinity(0)), "cpu": model,
            "load": os.getloadavg()[0],
            "date": time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime())}


def aligned(columns, rows):
    """A table as text."""
    cells = [[str(c) for c in row] for row in [columns, *rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(columns))]
    return "\n".join("  ".join(
        c.ljust(w) if i == 0 else c.rjust(w)
        for i, (c, w) in enumerate(zip(row, widths))) for row in cells)


def markdown(columns, rows):
    def line(cells):
        return "| " + " | ".join(str(c) for c in cells) + " |"

    return "\n".join([line(columns), line(["---"] * len(columns)),
                      *map(line, rows)])


def bounds_report(reports, quick):
    words = {True: "held", False: "MISSED", None: ""}
    return {"title": "Bounds" + (" (small sizes: only to show)" if quick
                                 else ""), "notes": [],
            "columns": ["what", "wanted", "measured", ""],
            "rows": [[what, wanted, measured, words[ok]]
                     for r in reports for what, wanted, measured, ok
                     in r["bounds"]]}


def plain(value):
    """For JSON, which has no NaN."""
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    return None if value != value else value


def write(out, host, reports):
    """article.md, article.json and the plots."""
    lines = ["# The article's table", "",
             f"Commit {host['commit']}, {host['cpus']} CPUs ({host['cpu']}), "
             f"{host['date']} UTC"
             + (", quick" if host["quick"] else "") + ".", ""]
    for report in [*reports, bounds_report(reports, host["quick"])]:
        lines += [f"## {report['title']}", "",
                  markdown(report["columns"], report["rows"]), ""]
        lines += [note + "\n" for note in report["notes"]]
        for name, kind, options in report.get("plots", ()):
            with open(f"{out}/{name}.svg", "w", encoding="utf-8") as f:
                f.write(KINDS[kind](**options))
            lines += [f"![{options['title']}]({name}.svg)", ""]
    with open(f"{out}/article.md", "w", encoding="utf-8") as f:
        f.write("\n".join(lines))
    with open(f"{out}/article.json", "w", encoding="utf-8") as f:
        json.dump(plain({"machine": host, "tables": [
            {k: r[k] for k in ("title", "columns", "rows", "bounds", "data")}
            for r in reports]}), f, indent=1, ensure_ascii=False)


def show(report):
    print(f"\n{report['title']}\n")
    print(aligned(report["columns"], report["rows"]))
    for note in report["notes"]:
        print(f"\n{note}")
    sys.stdout.flush()


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default=os.environ.get("LLM_TEST_MODEL"))
    parser.add_argument("--build", default=os.environ.get(
        "LLM_TEST_BUILD", os.path.join(TOP, "build")))
    parser.add_argument("--out", default=os.environ.get(
        "OUT", os.path.join(TOP, "build", "bench-article")))
    parser.add_argument("--only", default="a,b,c,d,e",
                        help="parts, separated by commas")
    parser.add_argument("--quick", action="store_true",
                        help="small sizes, few repetitions: two minutes")
    parser.add_argument("--tiny", action="store_true",
                        help="only to see that it works")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    if not args.model:
        parser.error("give --model, or LLM_TEST_MODEL in the environment")
    unknown = set(args.only.split(",")) - set(PARTS)
    if unknown:
        parser.error(f"no such part: {', '.join(sorted(unknown))}")
    return args


def main():
    args = arguments()
    setup = Setup(args)
    os.makedirs(args.out, exist_ok=True)
    host = dict(machine(), quick=setup.quick, seed=args.seed)
    start = time.monotonic()
    reports = []

    print(f"commit {host['commit']}, {host['cpus']} CPUs, {host['cpu']}, load "
          f"{host['load']:.2f}" + (", quick" if setup.quick else ""))
    for part in args.only.split(","):
        done = PARTS[part](setup)
        for report in done if isinstance(done, list) else [done]:
            reports.append(report)
            show(report)
    show(bounds_report(reports, setup.quick))
    write(args.out, host, reports)
    print(f"\n{time.monotonic() - start:.0f} s; article.md, article.json and "
          f"plots are in {args.out}")


if __name__ == "__main__":
    main()

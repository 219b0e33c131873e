"""From runs to the table: medians, the better peer, ratios, held or missed.

A run is {"work", "side", "family", "round", "measures": {name: number}}.  The
families: "ours", "L" (llama.cpp), "O" (OpenVINO GenAI).  Of the sets of a
family the one with the better median is compared with, for each workload and
measure.  The ratio is ours over theirs in the same round; the median of the
rounds decides.
"""

from collections import namedtuple

from article import aligned, markdown
from article_server import median, spread

# against: families whose best is meant; at_least: the ratio's bound, or
# at_most it; sets: which sets of a family count, by a part of their names
Check = namedtuple("Check", "work measure against at_least at_most sets",
                   defaults=(None, None, ""))

CHECKS = [
    Check("short-1", "tok_s", "L", 1.8),
    *(check for n in (16, 32) for check in (
        Check(f"short-{n}", "tok_s", "LO", 4),
        Check(f"short-{n}", "ttft_p95", "L", None, 1 / 4))),
    Check("shared-16", "tok_s", "O", 3.5),
    Check("shared-16", "tok_s", "L", 25),
    Check("shared-16", "ttft_p95", "L", None, 1 / 50),
    Check("shared-16", "hit", "O", None, 1 / 4),
    Check("multiturn-8", "tok_s", "L", 4),
    Check("multiturn-8", "ttft_p50", "L", None, 1 / 4),
    Check("mixed-8", "gap_max", "L", None, 1 / 8, "-b 256"),
    Check("mixed-8", "tok_s", "L", 4),
    Check("mixed-8", "long_ttft", "L", None, 1 / 2),
    *(Check(f"prefill-{t}t", f"prefill {n}", family, bound)
      for t in (1, 2) for n in (512, 1000)
      for family, bound in (("L", 2.5), ("O", 1.6))),
    Check("decode", "decode 0", "L", 1.7),
    Check("decode", "decode 1000", "L", 3),
    Check("tiny-32", "req_s", "L", 4),
]

UNITS = {"tok_s": "tok/s", "req_s": "req/s", "ttft_p50": "TTFT p50, ms",
         "ttft_p95": "TTFT p95, ms", "hit": "first token at a hit, ms",
         "gap_max": "worst gap, ms", "gap_p50": "gap p50, ms",
         "cold_ttft": "first token, cold, ms",
         "long_ttft": "long prompt's TTFT, ms"}
KEEP_WITHIN = 1.15


def low(measure):
    """Is less of it better?"""
    return not (measure in ("tok_s", "req_s")
                or measure.startswith(("prefill", "decode")))


def unit(measure):
    return UNITS.get(measure, measure + " tokens, tok/s")


def number(value):
    """Three digits that count."""
    if value is None or value != value:
        return "—"
    if value >= 100:
        return f"{value:.0f}"
    for digits, least in ((1, 10), (2, 1), (3, 0.1)):
        if value >= least:
            return f"{value:.{digits}f}"
    return f"{value:.4f}"


def by_round(runs, work, side, measure):
    return {run["round"]: run["measures"][measure] for run in runs
            if run["work"] == work and run["side"] == side
            and run["measures"].get(measure) is not None}


def sides(runs, work, families, sets=""):
    found = {}
    for run in runs:
        if (run["work"] == work and run["family"] in families
                and (run["family"] != "L" or sets in run["side"])):
            found[run["side"]] = run["family"]
    return list(found)


def best(runs, work, measure, families, sets=""):
    """(median, side) of the side with the best median, or None."""
    found = []
    for side in sides(runs, work, families, sets):
        values = by_round(runs, work, side, measure)
        if values:
            found.append((median(list(values.values())), side))
    if not found:
        return None
    return (min if low(measure) else max)(found)


def judge(runs, check):
    """One line of the table as {…}; verdict None: not measured."""
    row = {"check": check, "ours": None, "L": None, "O": None, "side": None,
           "ratios": [], "ratio": None, "verdict": None}
    for family in "LO":
        row[family] = best(runs, check.work, check.measure, family, check.sets)
    mine = by_round(runs, check.work, "ours", check.measure)
    if mine:
        row["ours"] = median(list(mine.values()))
    there = [row[family] for family in check.against if row[family]]
    if not mine or not there:
        return row
    row["side"] = (min if low(check.measure) else max)(there)[1]
    theirs = by_round(runs, check.work, row["side"], check.measure)
    row["ratios"] = [mine[i] / theirs[i] for i in sorted(mine)
                     if theirs.get(i)]
    if row["ratios"]:
        row["ratio"] = median(row["ratios"])
        row["verdict"] = (row["ratio"] >= check.at_least if check.at_least
                          else row["ratio"] <= check.at_most)
    return row


def worth_another_round(runs, work, side, family):
    """Is the set the best of its family in anything that is judged, or near
    it?  Others need not be measured again."""
    for check in CHECKS:
        if check.work != work or family not in check.against:
            continue
        top = best(runs, work, check.measure, family, check.sets)
        values = by_round(runs, work, side, check.measure)
        if not values or top is None:
            return True
        if check.sets not in side:
            continue
        own = median(list(values.values()))
        times = own / top[0] if low(check.measure) else top[0] / own
        if times <= KEEP_WITHIN:
            return True
    return False


def wanted(check):
    who = {"L": "L", "O": "O", "LO": "the better of L, O"}[check.against]
    if check.sets:
        who += f" ({check.sets})"
    if check.at_least:
        return f"≥ {check.at_least:g} × {who}"
    return f"≤ 1/{1 / check.at_most:g} {who}"


def verdicts(runs):
    """(columns, rows) of what is to be reached."""
    def peer(found):
        return (f"{number(found[0])} ({found[1].partition(' ')[2]})" if found
                else "—")

    rows = []
    for check in CHECKS:
        row = judge(runs, check)
        if row["ours"] is None and not row["L"] and not row["O"]:
            continue
        rows.append([
            check.work, unit(check.measure), number(row["ours"]),
            peer(row["L"]), peer(row["O"]), wanted(check),
            " / ".join(map(number, spread(row["ratios"]))),
            {True: "held", False: "MISSED", None: "not measured"}[
                row["verdict"]]])
    return ["workload", "measure", "ours", "L", "O", "wanted",
            "ratio: min / median / max", ""], rows


def everything(runs):
    """(columns, rows): each side's medians, with min and max of the first."""
    rows = []
    for work in dict.fromkeys(run["work"] for run in runs):
        for side in sides(runs, work, ("ours", "L", "O")):
            mine = [r["measures"] for r in runs
                    if r["work"] == work and r["side"] == side]
            for name in dict.fromkeys(k for m in mine for k in m):
                if name in UNITS or name.startswith(("prefill", "decode")):
                    values = [m[name] for m in mine
                              if m.get(name) == m.get(name) is not None]
                    if values:
                        rows.append([work, side, unit(name), " / ".join(
                            map(number, spread(values))), str(len(values))])
    return ["workload", "side", "measure", "min / median / max", "runs"], rows


def notes(runs):
    said = ["L: llama.cpp, the better of its flag sets (A: flash attention, "
            "B: without), with huge pages. O: OpenVINO GenAI, the best of its "
            "option sets, in process without HTTP; ours through NGINX. Values "
            "are medians; ratios compare runs of the same round."]
    noisy = [r for r in runs if r["measures"].get("noisy")]
    if noisy:
        said.append(f"{len(noisy)} of {len(runs)} runs are noisy: others used "
                    "the processors, and went on doing so.")
    failed = [r for r in runs if r["measures"].get("failed")]
    said += [f"Failed: {r['work']}, {r['side']}, round {r['round'] + 1}: "
             f"{r['measures']['failed']}" for r in failed]
    shares = [r["measures"]["client_share"] for r in runs
              if r["measures"].get("client_share") is not None
              and r["family"] != "O" and not r["work"].startswith(
                  ("prefill", "decode"))]
    if shares:
        said.append(f"The load generator took {100 * median(shares):.1f} % of "
                    f"the machine (median; at most {100 * max(shares):.1f} "
                    "%).")
    return said


def texts(runs, title):
    """(text for the screen, Markdown)."""
    plain, marked = [title], ["# Against the peers", "", title, ""]
    for heading, (columns, rows) in (("Ratios", verdicts(runs)),
                                     ("All measurements", everything(runs))):
        plain += ["", heading, "", aligned(columns, rows)]
        marked += [f"## {heading}", "", markdown(columns, rows), ""]
        if heading == "Ratios":
            for note in notes(runs):
                plain += ["", note]
                marked += [note, ""]
    return "\n".join(plain), "\n".join(marked)

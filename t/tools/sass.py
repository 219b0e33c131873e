#!/usr/bin/env python3
"""What nvcc made of the kernels, read off the objects.

    sass.py table OBJECT...                print the table
    sass.py check TABLE OBJECT...          TAP: rules, and the recorded table
    sass.py update TABLE OBJECT...         record it anew

A line is a kernel for a GPU: registers a thread, bytes of shared memory that
the kernel declares (what a launch asks for is not among them), stack, local
memory, and how often an instruction stands in its machine code.  cuobjdump
and nvdisasm come from PyPI (nvidia-cuda-cuobjdump, nvidia-cuda-nvdisasm) or
from the toolkit.
"""

import glob
import os
import re
import shutil
import subprocess
import sys

COLUMNS = ["reg", "shared", "stack", "local", "spill", "ldg128", "lds128",
           "stg128", "hmma", "imma", "idp", "ldgsts", "ldsm"]

INSTRUCTIONS = {
    "spill": re.compile(r"^(LDL|STL)\b"),
    "ldg128": re.compile(r"^LDG\S*\.128\b"),
    "lds128": re.compile(r"^LDS\S*\.128\b"),
    "stg128": re.compile(r"^STG\S*\.128\b"),
    "hmma": re.compile(r"^HMMA\b"),
    "imma": re.compile(r"^IMMA\b"),
    "idp": re.compile(r"^IDP\b"),
    "ldgsts": re.compile(r"^LDGSTS\b"),
    "ldsm": re.compile(r"^LDSM\b"),
}

# What a kernel must have.  Nothing may have stack, local memory or spills.
EXPECTED = [
    # scores and sums of values on tensor cores; a head of 32 is too narrow
    # for a lane to load 16 bytes of it
    (r"^(many|few)_kernel<", ["hmma", "lds128"]),
    (r"^(many|few)_kernel<(?!32,)", ["ldg128"]),
    # int8 products: dp4a for few rows, tensor cores with copies ahead above
    (r"^gemv<", ["idp", "ldg128", "lds128"]),
    (r"^gemm<", ["imma", "ldgsts", "ldg128"]),
    (r"^dense<", ["hmma", "ldgsts", "ldg128", "lds128"]),
    (r"^dot_float<", ["ldg128"]),
    (r"^(rmsnorm|quantise_rows)$", ["ldg128"]),
    (r"^(copy_kernel|gather)$", ["ldg128", "stg128"]),
]

# What a GPU does not have: Turing no asynchronous copies, and tensor cores
# only for f16 and integers, so that dense kernels are never launched there.
LACKS = {
    "sm_75": [
        (r"^gemm<", ["ldgsts"]),
        (r"^(many|few)_kernel<\d+,8>", ["hmma"]),
        (r"^dense<", ["hmma", "ldgsts", "lds128"]),
    ],
}


def tool(name):
    """The path of cuobjdump or nvdisasm, or None."""
    found = shutil.which(name)
    places = [os.path.join(p, "nvidia", "cu*", "bin", name) for p in sys.path]

    for pattern in places + ["/usr/local/cuda/bin/" + name]:
        found = found or next(iter(glob.glob(pattern)), None)
    return found


def dump(option, path):
    program = tool("cuobjdump")
    where = os.path.dirname(tool("nvdisasm")) + os.pathsep + os.environ["PATH"]

    return subprocess.run([program, option, path], check=True, text=True,
                          env=dict(os.environ, PATH=where),
                          stdout=subprocess.PIPE).stdout


def demangled(names):
    names = sorted(names)
    out = subprocess.run(["c++filt"], input="\n".join(names), text=True,
                         check=True, stdout=subprocess.PIPE).stdout
    short = {}

    for name, long in zip(names, out.splitlines()):
        long = re.sub(r"^void ", "", long).replace(" ", "")
        long = re.sub(r"\((?!anonymous).*\)$", "", long)
        short[name] = long
    return short


def resources(path, kernels):
    arch = name = None

    for line in dump("--dump-resource-usage", path).splitlines():
        if line.startswith("arch ="):
            arch = line.split()[-1]
        elif match := re.match(r"\s*Function (\S+):", line):
            name = match[1]
        elif "REG:" in line:
            value = dict(re.findall(r"(\w+)\S*?:(\d+)", line))
            row = kernels.setdefault((name, arch), dict.fromkeys(COLUMNS, 0))
            for column, key in (("reg", "REG"), ("shared", "SHARED"),
                                ("stack", "STACK"), ("local", "LOCAL")):
                row[column] = int(value[key])


def instructions(path, kernels):
    arch = row = None
    code = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z]\S*)")

    for line in dump("-sass", path).splitlines():
        if match := code.match(line):
            for column, pattern in INSTRUCTIONS.items():
                if row is not None and pattern.match(match[1]):
                    row[column] += 1
        elif line.startswith("arch ="):
            arch, row = line.split()[-1], None
        elif match := re.match(r"\s*Function : (\S+)", line):
            row = kernels[(match[1], arch)]


def read(paths):
    """{(kernel, arch): {column: number}}"""
    kernels = {}

    for path in paths:
        resources(path, kernels)
        instructions(path, kernels)

    short = demangled({name for name, _ in kernels})

    return {(short[name], arch): row for (name, arch), row in kernels.items()}


def lines(kernels):
    width = max(len(name) for name, _ in kernels)
    head = f"{'kernel':{width}} arch  "
    text = [head + " ".join(f"{c:>6}" for c in COLUMNS)]

    for name, arch in sorted(kernels, key=natural):
        row = kernels[(name, arch)]
        text.append(f"{name:{width}} {arch} "
                    + " ".join(f"{row[c]:6}" for c in COLUMNS))
    return text


def natural(key):
    return [int(w) if w.isdigit() else w
            for w in re.split(r"(\d+)", " ".join(key))]


def parse(text):
    kernels = {}

    for line in text:
        words = line.split()
        if words and words[0] not in ("#", "kernel"):
            kernels[(words[0], words[1])] = dict(
                zip(COLUMNS, map(int, words[2:])))
    return kernels


def faults(key, row):
    """What is wrong with a kernel, whatever has been recorded."""
    wrong = [f"{row[c]} in {c}" for c in ("stack", "local", "spill") if row[c]]
    lacks = [c for pattern, columns in LACKS.get(key[1], ())
             if re.search(pattern, key[0]) for c in columns]

    for pattern, wanted in EXPECTED:
        if re.search(pattern, key[0]):
            wrong += [f"no {c}" for c in wanted
                      if not row[c] and c not in lacks]
    return wrong


def check(recorded, built, update):
    """TAP; each kernel against the rules and against its recorded line."""
    n = bad = 0

    def say(ok, what, *why):
        nonlocal n, bad
        n += 1
        bad += not ok
        print(f"{'ok' if ok else 'not ok'} {n} - {what}")
        for line in why if not ok else ():
            print(f"# {line}")

    archs = {arch for _, arch in built}

    for key in sorted(built, key=natural):
        wrong = faults(key, built[key])
        say(not wrong, f"{key[0]}, {key[1]}: rules", "; ".join(wrong))

    for pattern, _ in EXPECTED:
        say(any(re.search(pattern, k) for k, _ in built),
            f"there are kernels {pattern}")

    for key in sorted({*built, *recorded}, key=natural):
        if key[1] not in archs or key[1] not in {a for _, a in recorded}:
            continue
        have, want = built.get(key), recorded.get(key)
        same = have is not None and have == want
        show = lines({key: have or want})
        was = lines({key: want})[1] if want else "no such kernel"
        now = lines({key: have})[1] if have else "no such kernel"
        say(same, f"{key[0]}, {key[1]}: as recorded", show[0],
            "recorded: " + was, "built:    " + now,
            "if that is meant: " + update)

    print(f"1..{n}")
    return bad


HEADER = """# What nvcc makes of the kernels: see t/tools/sass.py.  To write it anew,
# after looking at what changed:
#     {}
# {}
"""


def compiler():
    path = os.environ.get("NVCC") or shutil.which("nvcc") \
        or "/usr/local/cuda/bin/nvcc"
    out = subprocess.run([path, "--version"], stdout=subprocess.PIPE,
                         text=True, check=True).stdout

    return re.search(r"release \S+ (V\S+)", out)[1]


def main():
    what, *paths = sys.argv[1:]
    update = ("python3 t/tools/sass.py update t/cuda/sass_table.txt "
              "build/gpu/kernels/cuda/*.o")

    if tool("cuobjdump") is None or tool("nvdisasm") is None:
        sys.exit("no cuobjdump or nvdisasm")

    if what == "table":
        print("\n".join(lines(read(paths))))
    elif what == "update":
        text = "\n".join(lines(read(paths[1:])))
        with open(paths[0], "w", encoding="ascii") as f:
            f.write(HEADER.format(update, "nvcc " + compiler()) + text + "\n")
    elif what == "check":
        with open(paths[0], encoding="ascii") as f:
            recorded = f.read().splitlines()
        version = next((w.split()[2] for w in recorded
                        if w.startswith("# nvcc")), None)
        # another compiler makes other code: then only the rules hold
        if version != compiler():
            print(f"# recorded with nvcc {version}, this is {compiler()}")
            recorded = []
        sys.exit(1 if check(parse(recorded), read(paths[1:]), update) else 0)
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main()

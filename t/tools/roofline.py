#!/usr/bin/env python3
"""How fast a GPU could decode and prefill at best: a table.

    roofline.py [--model NAME]... [--type T]... [--depth N]
                [--json] [--count-only]

Bytes are those of `llm-engine plan`.  Kernels are counted: the engine over the
emulated GPU (make build/emu/llm-engine) generates from models of one and of
two layers of that shape, three tokens and four, behind N words of prompt (1;
beyond 256 attention has several splits), and the names of the kernels that ran
are compared.  LLM_TEST_BUILD is the folder of both programs.

launches   that many kernels a token cost 1.3 us each, in a graph: measured on
           an H100 by "Look Ma, No Bubbles!", Hazy Research, 2025
decode     bytes / bandwidth of the data sheet; prefill: two operations a
           weight, BF16 dense tensor cores
"""

import argparse
import collections
import json
import os
import re
import subprocess
import tempfile

BUILD = os.environ.get("LLM_TEST_BUILD", "build")
LAUNCH_US = 1.3
CONTEXTS = [1024, 8192]

# the data sheets: bytes a second, BF16 operations a second without sparsity
GPUS = {"A100 80GB": (2.039e12, 312e12), "H100 SXM": (3.35e12, 989e12),
        "H200": (4.8e12, 989e12)}

# llama-3-8b has the shape of Llama 3.1 8B
MODELS = {"llama-3.2-1b": 16, "llama-3-8b": 32,
          "smollm2-135m": 30}
TYPES = ["bf16", "q4_0"]


def run(*command, **environment):
    return subprocess.run(command, check=True, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                          env=dict(os.environ, **environment)).stdout


def bytes_a_token(model, dtype, context):
    """What a step of one request reads; the plan says it as a rate."""
    bandwidth = 1e9  # GB/s: digits enough
    out = run(f"{BUILD}/llm-engine", "plan", "--like", model, "--dtype", dtype,
              "--memory", "400GB", "--context", "8192", "--mean-tokens",
              str(context), "--bandwidth", f"{bandwidth:.0f}")

    return bandwidth * 1e9 / float(re.search(r"1 request +([\d.]+)", out)[1])


def trace(folder, path, n_tokens, depth):
    """Names of all kernels of a run of n_tokens, counted."""
    names = os.path.join(folder, "trace")

    run(f"{BUILD}/emu/llm-engine", "generate", "--model", path, "--device",
        "cuda", "--prompt", "a " * depth, "--max-tokens", str(n_tokens),
        "--ignore-eos", "--temperature", "0", "--kv-cache-memory", "16m",
        "--max-model-len", str(2 * depth + 30), "--max-num-seqs", "2",
        "--max-num-batched-tokens", "32",
        LLM_SHIM_TRACE=names)
    with open(names, encoding="ascii") as f:
        return collections.Counter(line.strip() for line in f)


def count(model, dtype, depth):
    """Kernels of a decode step: those of a layer, and the rest."""
    steps = []

    with tempfile.TemporaryDirectory() as folder:
        for layers in (1, 2):
            path = os.path.join(folder, f"{layers}.gguf")
            run(f"{BUILD}/llm-engine", "synth", "--like", model, "--type",
                dtype, "--layers", str(layers), "--vocab", "600", "--context",
                str(2 * depth + 62), "--seed", "1", "--out", path)
            three = trace(folder, path, 3, depth)
            four = trace(folder, path, 4, depth)
            four.subtract(three)
            steps.append(four)
            os.unlink(path)

    layer = collections.Counter(steps[1])
    layer.subtract(steps[0])
    rest = collections.Counter(steps[0])
    rest.subtract(layer)

    return [{name: n for name, n in c.items() if n} for c in (layer, rest)]


def splits():
    """Kernels a layer that attention over more than one split adds, if any;
    the same in every model, and a small one takes seconds."""
    deep, flat = (count("smollm2-135m", "q4_0", depth)[0] for depth in (300, 1))

    return sum(deep.values()) - sum(flat.values())


def rows(model, dtype, layer, rest, more):
    # all contexts of the table have several splits
    launches = (MODELS[model] * (sum(layer.values()) + more)
                + sum(rest.values()))
    weights = bytes_a_token(model, "bf16", 1) / 2

    for gpu, (bandwidth, flops) in GPUS.items():
        for context in CONTEXTS:
            size = bytes_a_token(model, dtype, context)
            seconds = size / bandwidth
            yield {"model": model, "type": dtype, "gpu": gpu,
                   "context": context, "bytes": size, "launches": launches,
                   "decode": 1 / seconds,
                   "decode_launched": 1 / (seconds
                                           + launches * LAUNCH_US * 1e-6),
                   "prefill": flops / (2 * weights)}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", action="append", choices=MODELS)
    parser.add_argument("--type", action="append", choices=TYPES)
    parser.add_argument("--depth", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--count-only", action="store_true")
    args = parser.parse_args()
    result = {"layer": {}, "rest": {}, "rows": [],
              "splits": 0 if args.count_only else splits()}

    for model in args.model or ["llama-3.2-1b", "llama-3-8b"]:
        for dtype in args.type or TYPES:
            name = f"{model} {dtype}"
            layer, rest = count(model, dtype, args.depth)
            result["layer"][name], result["rest"][name] = layer, rest
            if not args.count_only:
                result["rows"] += rows(model, dtype, layer, rest,
                                       result["splits"])

    if args.json:
        print(json.dumps(result, indent=1))
        return

    for name, layer in result["layer"].items():
        print(f"{name}: {sum(layer.values())} kernels a layer and "
              f"{sum(result['rest'][name].values())} more a step")
        for kernel, n in sorted(layer.items()):
            print(f"    {n} {kernel}")

    if args.count_only:
        return

    print(f"over 256 tokens: {result['splits']} more a layer")
    print(f"\n{'model':14}{'type':6}{'GPU':11}{'context':>8}{'GB/token':>10}"
          f"{'launches':>10}{'decode/s':>10}{'launched':>10}{'prefill/s':>11}")
    for r in result["rows"]:
        print(f"{r['model']:14}{r['type']:6}{r['gpu']:11}{r['context']:8}"
              f"{r['bytes'] / 1e9:10.3f}{r['launches']:10}{r['decode']:10.0f}"
              f"{r['decode_launched']:10.0f}{r['prefill']:11.0f}")


if __name__ == "__main__":
    main()

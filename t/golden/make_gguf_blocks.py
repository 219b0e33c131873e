#!/usr/bin/env python3
"""Blocks of every GGUF type with the values they mean, as the reference
implementation in PyPI's `gguf` package sees them.

    pip install gguf numpy
    python3 t/golden/make_gguf_blocks.py > t/golden/gguf_blocks.txt

Lines: "decode TYPE BLOCKS VALUES" (random blocks, each bit pattern possible,
scales finite) and "encode TYPE VALUES BLOCKS" (what quantising the values
gives).  BLOCKS is hex of the bytes, VALUES hex of little-endian binary32.
"""

import sys
from importlib import metadata

import gguf
import numpy as np
from gguf import GGMLQuantizationType as T
from gguf import quants

rng = np.random.default_rng(20240607)
halves = {T.Q4_0: [0], T.Q4_1: [0, 2], T.Q5_0: [0], T.Q5_1: [0, 2],
          T.Q8_0: [0], T.Q4_K: [0, 2], T.Q5_K: [0, 2], T.Q6_K: [208]}

version = metadata.version("gguf")
print(f"# made by t/golden/make_gguf_blocks.py, numpy {np.__version__}"
      f", gguf {version}")

for kind, places in halves.items():
    size = gguf.GGML_QUANT_SIZES[kind][1]
    blocks = rng.integers(0, 256, (4, size), dtype=np.uint8)
    for place in places:
        scale = rng.uniform(-0.1, 0.1, 4).astype(np.float16)
        blocks[:, place:place + 2] = scale.view(np.uint8).reshape(4, 2)
    values = quants.dequantize(blocks, kind).astype("<f4")
    print("decode", kind.name, blocks.tobytes().hex(), values.tobytes().hex())

for kind in (T.F16, T.BF16):
    size = 64
    blocks = rng.integers(0, 256, (1, size), dtype=np.uint8)
    blocks[:, 1::2] &= 0xBF  # finite
    values = quants.dequantize(blocks, kind).astype("<f4")
    print("decode", kind.name, blocks.tobytes().hex(), values.tobytes().hex())

for kind in (T.Q4_0, T.Q4_1, T.Q5_0, T.Q5_1, T.Q8_0, T.F16, T.BF16):
    values = rng.normal(0, 1, (4, 32)).astype(np.float32)
    values[1] *= 1e-3
    values[2] = 0
    values[3, 5] = 40
    blocks = quants.quantize(values, kind)
    if kind is T.F16:
        blocks = values.astype(np.float16).view(np.uint8)
    print("encode", kind.name, values.astype("<f4").tobytes().hex(),
          np.ascontiguousarray(blocks).tobytes().hex())
sys.stdout.flush()

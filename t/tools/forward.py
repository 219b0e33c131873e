#!/usr/bin/env python3
"""An independent forward pass of llama-architecture GGUF files, in numpy.

    forward.py MODEL LOGITS ID...

Reads LOGITS ([n][n_vocab] f32, as t/tools/logits writes it), computes the same
in double precision from dequantised weights, with K and V rounded to f16 as
the KV cache does, and prints the largest absolute difference, the largest
logit, and how many rows have the same best token.

Written from the GGUF specification and the papers (RMSNorm, RoPE, GQA, SwiGLU),
not from this project's C code, so that the two check one another.
"""

import struct
import sys

import numpy as np

SCALARS = {0: 'u1', 1: 'i1', 2: '<u2', 3: '<i2', 4: '<u4', 5: '<i4', 6: '<f4',
           7: '?', 10: '<u8', 11: '<i8', 12: '<f8'}


# --- block formats ---

def halves(raw):
    return np.ascontiguousarray(raw).view('<f2').astype('f8')


def nibbles(raw):
    """Low nibbles of a block first, then the high ones."""
    return np.concatenate([raw & 15, raw >> 4], axis=1).astype('f8')


def fifth_bits(raw):
    bits = np.ascontiguousarray(raw).view('<u4')
    return ((bits >> np.arange(32, dtype='u4')) & 1).astype('f8') * 16


def q4_0(b):
    return halves(b[:, :2]) * (nibbles(b[:, 2:]) - 8)


def q4_1(b):
    return halves(b[:, :2]) * nibbles(b[:, 4:]) + halves(b[:, 2:4])


def q5_0(b):
    return halves(b[:, :2]) * (nibbles(b[:, 6:]) + fifth_bits(b[:, 2:6]) - 16)


def q5_1(b):
    return (halves(b[:, :2]) * (nibbles(b[:, 8:]) + fifth_bits(b[:, 4:8]))
            + halves(b[:, 2:4]))


def q8_0(b):
    return halves(b[:, :2]) * np.ascontiguousarray(b[:, 2:]).view('i1')


def k_scales(s):
    """Twelve bytes: eight 6-bit scales and eight 6-bit minima."""
    low, mid, top = s[:, 0:4], s[:, 4:8], s[:, 8:12]
    scale = np.concatenate([low & 63, (top & 15) | ((low >> 6) << 4)], axis=1)
    minimum = np.concatenate([mid & 63, (top >> 4) | ((mid >> 6) << 4)],
                             axis=1)
    return scale.astype('f8'), minimum.astype('f8')


def k_rows(q):
    """128 bytes in four runs of 32: low nibbles are 32 values, high the next."""
    runs = q.reshape(len(q), 4, 1, 32)
    return np.concatenate([runs & 15, runs >> 4], axis=2).reshape(len(q), 8, 32)


def k_value(b, q):
    scale, minimum = k_scales(b[:, 4:16])
    d, dmin = halves(b[:, :2]), halves(b[:, 2:4])
    x = (d * scale)[:, :, None] * q - (dmin * minimum)[:, :, None]
    return x.reshape(len(b), 256)


def q4_k(b):
    return k_value(b, k_rows(b[:, 16:144]).astype('f8'))


def q5_k(b):
    high = (b[:, None, 16:48] >> np.arange(8, dtype='u1')[None, :, None]) & 1
    return k_value(b, k_rows(b[:, 48:176]).astype('f8') + 16.0 * high)


def q6_k(b):
    low = b[:, 0:128].reshape(-1, 2, 2, 32)
    high = b[:, 128:192].reshape(-1, 2, 1, 32)
    shifts = np.array([0, 2, 4, 6], dtype='u1')[None, None, :, None]
    q = np.concatenate([low & 15, low >> 4], axis=2) | ((high >> shifts & 3)
                                                        << 4)
    scale = np.ascontiguousarray(b[:, 192:208]).view('i1').astype('f8')
    x = (q.reshape(-1, 16, 16).astype('f8') - 32) * scale[:, :, None]
    return halves(b[:, 208:210]) * x.reshape(-1, 256)


def bf16(b):
    return (b.view('<u2').astype('u4') << 16).view('<f4').astype('f8')


# number: (values in a block, bytes, decoder)
TYPES = {
    0: (1, 4, lambda b: b.view('<f4').astype('f8')),
    1: (1, 2, halves), 30: (1, 2, bf16),
    2: (32, 18, q4_0), 3: (32, 20, q4_1), 6: (32, 22, q5_0),
    7: (32, 24, q5_1), 8: (32, 34, q8_0), 12: (256, 144, q4_k),
    13: (256, 176, q5_k), 14: (256, 210, q6_k),
}


# --- the file ---

class Gguf:
    def __init__(self, path):
        with open(path, 'rb') as f:
            self.raw = f.read()
        self.at = 8
        n_tensors, n_kvs = self.number('<Q'), self.number('<Q')
        self.kv = {}
        for _ in range(n_kvs):
            key = self.string()
            self.kv[key] = self.value(self.number('<I'))
        self.table = {}
        for _ in range(n_tensors):
            name = self.string()
            dims = [self.number('<Q') for _ in range(self.number('<I'))]
            kind, offset = self.number('<I'), self.number('<Q')
            self.table[name] = (dims, kind, offset)
        align = self.kv.get('general.alignment', 32)
        self.data = -(-self.at // align) * align

    def number(self, code):
        value = struct.unpack_from(code, self.raw, self.at)[0]
        self.at += struct.calcsize(code)
        return value

    def string(self):
        n = self.number('<Q')
        self.at += n
        return self.raw[self.at - n:self.at].decode('utf-8', 'replace')

    def value(self, kind):
        if kind == 8:
            return self.string()
        if kind == 9:
            item, n = self.number('<I'), self.number('<Q')
            if item == 8:
                return [self.string() for _ in range(n)]
            dtype = np.dtype(SCALARS[item])
            self.at += n * dtype.itemsize
            return np.frombuffer(self.raw, dtype, n,
                                 self.at - n * dtype.itemsize)
        dtype = np.dtype(SCALARS[kind])
        self.at += dtype.itemsize
        return np.frombuffer(self.raw, dtype, 1,
                             self.at - dtype.itemsize)[0].item()

    def tensor(self, name):
        dims, kind, offset = self.table[name]
        block, size, decode = TYPES[kind]
        n = int(np.prod(dims))
        raw = np.frombuffer(self.raw, 'u1', n // block * size,
                            self.data + offset)
        return decode(raw.reshape(-1, size)).reshape(dims[::-1])


# --- the model ---

def rms(x, w, eps):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * w


def rotate(x, angles):
    """Neighbours (2i, 2i + 1) of the first 2 * len(angles) values."""
    n = 2 * angles.shape[1]
    c, s = np.cos(angles)[:, None], np.sin(angles)[:, None]
    a, b = x[..., 0:n:2], x[..., 1:n:2]
    out = x.copy()
    out[..., 0:n:2] = a * c - b * s
    out[..., 1:n:2] = a * s + b * c
    return out


def as_cached(x):
    return x.astype('f4').astype('f2').astype('f8')


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def forward(g, ids):
    kv = {k[6:]: v for k, v in g.kv.items() if k.startswith('llama.')}
    n, heads = len(ids), kv['attention.head_count']
    kv_heads = kv.get('attention.head_count_kv', heads)
    dim = kv.get('attention.key_length', kv['embedding_length'] // heads)
    rot = kv.get('rope.dimension_count', dim)
    eps = kv['attention.layer_norm_rms_epsilon']
    base = kv.get('rope.freq_base', 10000.0)

    freqs = base ** (-np.arange(0, rot, 2) / rot)
    freqs = freqs / kv.get('rope.scaling.factor', 1.0)
    if 'rope_freqs.weight' in g.table:
        freqs = freqs / g.tensor('rope_freqs.weight')
    angles = np.arange(n)[:, None] * freqs[None, :]
    future = np.triu(np.full((n, n), -np.inf), 1)

    embd = g.tensor('token_embd.weight')
    x = embd[ids]
    for i in range(kv['block_count']):
        def w(name):
            return g.tensor(f'blk.{i}.{name}.weight')

        h = rms(x, w('attn_norm'), eps)
        q = rotate((h @ w('attn_q').T).reshape(n, heads, dim), angles)
        k = rotate((h @ w('attn_k').T).reshape(n, kv_heads, dim), angles)
        v = (h @ w('attn_v').T).reshape(n, kv_heads, dim)
        k = np.repeat(as_cached(k), heads // kv_heads, axis=1)
        v = np.repeat(as_cached(v), heads // kv_heads, axis=1)
        p = softmax(np.einsum('ihd,jhd->hij', q, k) / np.sqrt(dim) + future)
        mixed = np.einsum('hij,jhd->ihd', p, v).reshape(n, heads * dim)
        x = x + mixed @ w('attn_output').T

        h = rms(x, w('ffn_norm'), eps)
        gate = h @ w('ffn_gate').T
        x = x + (gate / (1 + np.exp(-gate)) * (h @ w('ffn_up').T)) \
            @ w('ffn_down').T

    head = g.tensor('output.weight') if 'output.weight' in g.table else embd
    return rms(x, g.tensor('output_norm.weight'), eps) @ head.T


def main():
    model, path, ids = sys.argv[1], sys.argv[2], [int(a) for a in sys.argv[3:]]
    want = forward(Gguf(model), np.array(ids))
    got = np.fromfile(path, '<f4').reshape(want.shape).astype('f8')
    same = int((got.argmax(-1) == want.argmax(-1)).sum())
    print(f'{np.abs(got - want).max():.6g} {np.abs(want).max():.6g} '
          f'{same} {len(ids)}')


if __name__ == '__main__':
    main()

#!/usr/bin/env python3
"""Writes a tiny but complete llama-architecture GGUF file.

Weights are random blocks from a seed, so a file is reproducible and needs no
download.  The vocabulary is byte-level BPE (256 bytes, a few merges, the
control tokens of ChatML).  Rows of the head are scaled so that mostly printable
ASCII is generated.  Options bend single values, for hostile files.

Needs Python's standard library only.
"""

import argparse
import math
import random
import struct
import sys

# type: (GGUF number, values in a block)
TYPES = {
    'F32': (0, 1), 'F16': (1, 1), 'Q4_0': (2, 32), 'Q4_1': (3, 32),
    'Q5_0': (6, 32), 'Q5_1': (7, 32), 'Q8_0': (8, 32), 'Q4_K': (12, 256),
    'Q5_K': (13, 256), 'Q6_K': (14, 256), 'BF16': (30, 1),
}

VALUES = {
    'u8': (0, '<B'), 'i8': (1, '<b'), 'u16': (2, '<H'), 'i16': (3, '<h'),
    'u32': (4, '<I'), 'i32': (5, '<i'), 'f32': (6, '<f'), 'bool': (7, '<?'),
    'u64': (10, '<Q'), 'i64': (11, '<q'), 'f64': (12, '<d'),
}

CONTROL = ['<|endoftext|>', '<|im_start|>', '<|im_end|>']

MERGES = [
    ('t', 'h'), ('th', 'e'), ('i', 'n'), ('e', 'r'), ('a', 'n'), ('o', 'n'),
    ('Ġ', 't'), ('Ġ', 'a'), ('Ġt', 'h'), ('Ġth', 'e'), ('e', 'n'), ('r', 'e'),
    ('Ġ', 's'), ('o', 'r'), ('a', 't'), ('an', 'd'), ('Ġ', 'and'), ('l', 'l'),
    ('in', 'g'), ('e', 's'), ('Ġ', 'w'), ('o', 'u'), ('i', 's'), ('l', 'o'),
    ('e', 'd'), ('h', 'e'), ('he', 'll'), ('hell', 'o'), ('Ġ', 'Ġ'),
]

TEMPLATE = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' "
    "+ message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def byte_alphabet():
    """GPT-2's printable stand-ins for the 256 bytes, in byte order."""
    plain = (list(range(0x21, 0x7f)) + list(range(0xa1, 0xad))
             + list(range(0xae, 0x100)))
    extra = iter(range(256, 512))
    return [chr(b) if b in plain else chr(next(extra)) for b in range(256)]


def half(x):
    return struct.pack('<e', x)


def block(rng, kind, std):
    """One random block whose values have about this standard deviation."""
    d = std * rng.uniform(0.7, 1.3)

    if kind == 'F32':
        return struct.pack('<f', rng.gauss(0, std))
    if kind == 'F16':
        return half(rng.gauss(0, std))
    if kind == 'BF16':
        return struct.pack('<f', rng.gauss(0, std))[2:]
    if kind == 'Q4_0':
        return half(d / 4.6) + rng.randbytes(16)
    if kind == 'Q4_1':
        return half(d / 4.6) + half(-7.5 * d / 4.6) + rng.randbytes(16)
    if kind == 'Q5_0':
        return half(d / 9.2) + rng.randbytes(20)
    if kind == 'Q5_1':
        return half(d / 9.2) + half(-15.5 * d / 9.2) + rng.randbytes(20)
    if kind == 'Q8_0':
        return half(d / 74) + rng.randbytes(32)
    if kind == 'Q4_K':
        return half(d / 190) + half(d / 190 * 7.5) + rng.randbytes(12 + 128)
    if kind == 'Q5_K':
        return (half(d / 380) + half(d / 380 * 15.5)
                + rng.randbytes(12 + 32 + 128))
    if kind == 'Q6_K':
        return rng.randbytes(128 + 64 + 16) + half(d / 1370)
    raise ValueError(kind)


def matrix(rng, kind, n_in, n_out, gain=None):
    """n_out rows of n_in; gain: a factor for each row."""
    size = TYPES[kind][1]
    if n_in % size:
        sys.exit(f'rows of {n_in} values do not divide into {kind} blocks')
    rows = []
    for o in range(n_out):
        std = (gain[o] if gain else 1.0) / math.sqrt(n_in)
        rows += [block(rng, kind, std) for _ in range(n_in // size)]
    return b''.join(rows)


def vocabulary(kind):
    """Tokens, their types, merges and the gain of each head row."""
    letters = byte_alphabet()
    if kind == 'tiny':
        tokens, merges = CONTROL + ['a', 'b', 'ab'], [('a', 'b')]
    else:
        tokens = CONTROL + letters + [a + b for a, b in MERGES]
        merges = MERGES
    printable = {letters[b] for b in range(0x20, 0x7f)}
    gain = [1.0 if t == '<|im_end|>' or all(c in printable for c in t) else 0.05
            for t in tokens]
    gain[0] = gain[1] = 0.05
    types = [3 if t in CONTROL else 1 for t in tokens]
    return tokens, types, [f'{a} {b}' for a, b in merges], gain


def string(text):
    raw = text if isinstance(text, bytes) else text.encode()
    return struct.pack('<Q', len(raw)) + raw


def scalar(kind, text):
    if kind == 'str':
        return struct.pack('<I', 8) + string(text)
    number, code = VALUES[kind]
    if kind == 'bool':
        value = str(text).lower() in ('1', 'true')
    elif kind[0] == 'f':
        value = float(text)
    else:
        value = int(text)
    return struct.pack('<I', number) + struct.pack(code, value)


def array(kind, items):
    if kind == 'str':
        return (struct.pack('<IIQ', 9, 8, len(items))
                + b''.join(string(i) for i in items))
    number, code = VALUES[kind]
    return (struct.pack('<IIQ', 9, number, len(items))
            + b''.join(struct.pack(code, i) for i in items))


def metadata(a, vocab):
    tokens, types, merges, _ = vocab
    kvs = {
        'general.architecture': scalar('str', 'llama'),
        'general.name': scalar('str', a.name),
        'llama.block_count': scalar('u32', a.layers),
        'llama.context_length': scalar('u32', a.ctx),
        'llama.embedding_length': scalar('u32', a.embd),
        'llama.feed_forward_length': scalar('u32', a.ff),
        'llama.attention.head_count': scalar('u32', a.heads),
        'llama.attention.head_count_kv': scalar('u32', a.kv_heads),
        'llama.rope.freq_base': scalar('f32', a.rope_base),
        'llama.attention.layer_norm_rms_epsilon': scalar('f32', 1e-5),
        'tokenizer.ggml.model': scalar('str', 'gpt2'),
        'tokenizer.ggml.pre': scalar('str', a.pre),
        'tokenizer.ggml.tokens': array('str', tokens),
        'tokenizer.ggml.token_type': array('i32', types),
        'tokenizer.ggml.merges': array('str', merges),
        'tokenizer.ggml.bos_token_id': scalar('u32', 1),
        'tokenizer.ggml.eos_token_id': scalar('u32', 2),
        'tokenizer.ggml.unknown_token_id': scalar('u32', 0),
        'tokenizer.ggml.padding_token_id': scalar('u32', 2),
        'tokenizer.ggml.add_bos_token': scalar('bool', False),
        'tokenizer.chat_template': scalar('str', TEMPLATE),
    }
    if a.head_dim:
        kvs['llama.attention.key_length'] = scalar('u32', a.head_dim)
        kvs['llama.attention.value_length'] = scalar('u32', a.head_dim)
        kvs['llama.rope.dimension_count'] = scalar('u32', a.head_dim)
    for item in a.kv:
        key, _, value = item.partition('=')
        kind, _, text = value.partition(':')
        kvs[key] = scalar(kind, text)
    for key in a.drop:
        kvs.pop(key, None)
    return kvs


def tensors(a, vocab):
    """(name, dims, type, bytes) of every tensor."""
    rng = random.Random(a.seed)
    n_vocab = len(vocab[0])
    gain = [g * a.gain for g in vocab[3]]
    head_dim = a.head_dim or a.embd // a.heads
    n_q, n_kv = a.heads * head_dim, a.kv_heads * head_dim
    embd_type = a.embd_type or a.type
    out = []

    def add(name, kind, n_in, n_out, gains=None):
        out.append((name + '.weight', [n_in, n_out], kind,
                    matrix(rng, kind, n_in, n_out, gains)))

    def norm(name, n=a.embd):
        raw = [rng.uniform(0.5, 1.5) for _ in range(n)]
        out.append((name + '.weight', [n], 'F32', struct.pack(f'<{n}f', *raw)))

    add('token_embd', embd_type, a.embd, n_vocab, gain)
    if a.separate_head:
        add('output', embd_type, a.embd, n_vocab, gain)
    if a.rope_freqs:
        norm('rope_freqs', head_dim // 2)
    norm('output_norm')
    for i in range(a.layers):
        norm(f'blk.{i}.attn_norm')
        add(f'blk.{i}.attn_q', a.type, a.embd, n_q)
        add(f'blk.{i}.attn_k', a.type, a.embd, n_kv)
        add(f'blk.{i}.attn_v', a.v_type or a.type, a.embd, n_kv)
        add(f'blk.{i}.attn_output', a.type, n_q, a.embd)
        norm(f'blk.{i}.ffn_norm')
        add(f'blk.{i}.ffn_gate', a.type, a.embd, a.ff)
        add(f'blk.{i}.ffn_up', a.type, a.embd, a.ff)
        add(f'blk.{i}.ffn_down', a.type, a.ff, a.embd)
    return [t for t in out if t[0] not in a.drop_tensor]


def build(a):
    vocab = vocabulary(a.vocab)
    kvs = metadata(a, vocab)
    table = tensors(a, vocab)
    align = 32

    head = b'GGUF' + struct.pack('<IQQ', 3, len(table), len(kvs))
    head += b''.join(string(k) + v for k, v in kvs.items())
    data = b''
    for name, dims, kind, raw in table:
        head += string(name) + struct.pack('<I', len(dims))
        head += struct.pack(f'<{len(dims)}Q', *dims)
        head += struct.pack('<IQ', TYPES[kind][0], len(data))
        data += raw + bytes(-len(raw) % align)
    return head + bytes(-len(head) % align) + data


def arguments(argv):
    p = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    p.add_argument('out')
    p.add_argument('--seed', type=int, default=1)
    p.add_argument('--name', default='tiny')
    p.add_argument('--layers', type=int, default=2)
    p.add_argument('--embd', type=int, default=64)
    p.add_argument('--ff', type=int, default=128)
    p.add_argument('--heads', type=int, default=4)
    p.add_argument('--kv-heads', type=int, default=2)
    p.add_argument('--head-dim', type=int, default=0,
                   help='written only when given; else embd / heads')
    p.add_argument('--ctx', type=int, default=2048)
    p.add_argument('--rope-base', type=float, default=10000)
    p.add_argument('--rope-freqs', action='store_true')
    p.add_argument('--type', choices=TYPES, default='Q8_0')
    p.add_argument('--embd-type', choices=TYPES)
    p.add_argument('--v-type', choices=TYPES)
    p.add_argument('--separate-head', action='store_true')
    p.add_argument('--gain', type=float, default=4,
                   help='of the head rows: how decided the model is')
    p.add_argument('--vocab', choices=['bytes', 'tiny'], default='bytes')
    p.add_argument('--pre', default='gpt-2')
    p.add_argument('--kv', action='append', default=[], metavar='KEY=KIND:TEXT',
                   help='add or replace a key; KIND: str, u32, f32, bool ...')
    p.add_argument('--drop', action='append', default=[], metavar='KEY')
    p.add_argument('--drop-tensor', action='append', default=[])
    p.add_argument('--truncate', type=int, metavar='BYTES',
                   help='write only so many bytes')
    return p.parse_args(argv)


def main():
    a = arguments(sys.argv[1:])
    raw = build(a)
    with open(a.out, 'wb') as f:
        f.write(raw if a.truncate is None else raw[:a.truncate])


if __name__ == '__main__':
    main()

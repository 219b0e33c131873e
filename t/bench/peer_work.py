"""The workloads: what is asked, by how many, how often.

Everything comes from a seed, so that all sides get the same questions; texts
are plain words, about one token each.  A size has three values: for the whole
measurement, for a quick one, and for the test that only sees whether it works.
"""

import random
from dataclasses import dataclass, replace

from article_load import WORDS

MODES = ("full", "quick", "tiny")
HITS = 5                    # single requests that find their prefix cached

# flag sets of the first peer, option sets of the second
LLAMA = ("A", "B")
SMALL_BATCH = ("A -b 256", "B -b 256")
OPENVINO = ("default", "bf16", "u8")


@dataclass
class Work:
    """One row, or a few, of the table."""

    name: str
    kind: str               # short, shared, multiturn, mixed, tiny, bench
    clients: int = 1
    requests: tuple = (0,)
    words: int = 0          # of a question
    system: tuple = (0,)    # words that all have in common
    max_tokens: tuple = (0,)
    turns: tuple = (0,)
    long_words: tuple = (0,)
    every_s: tuple = (0,)
    duration_s: tuple = (0,)
    threads: int = 0        # bench
    prompts: tuple = ((),)  # bench: lengths of prompts
    depths: tuple = ((),)   # bench: lengths of contexts to decode at
    llama: tuple = LLAMA
    openvino: tuple = ()
    quick_llama: tuple = LLAMA
    quick_openvino: tuple = ()

    def sized(self, mode):
        """With one value for each size."""
        i = MODES.index(mode)
        chosen = {name: value[min(i, len(value) - 1)] for name in (
            "requests", "system", "max_tokens", "turns", "long_words",
            "every_s", "duration_s", "prompts", "depths")
            for value in [getattr(self, name)]}
        if mode == "quick":
            chosen.update(llama=self.quick_llama,
                          openvino=self.quick_openvino)
        return replace(self, **chosen)


def short(clients, requests):
    return Work(f"short-{clients}", "short", clients, requests, words=45,
                max_tokens=(64, 32, 4), openvino=OPENVINO,
                quick_openvino=("bf16",))


def bench(name, threads, prompts=((),), depths=((),), openvino=()):
    return Work(name, "bench", threads=threads, prompts=prompts, depths=depths,
                max_tokens=(64, 32, 2), openvino=openvino,
                quick_openvino=openvino[1:2])


def plan(mode, cpus):
    """What is measured, in the order in which it is.  Sides that several
    need are asked one after the other: they start only once."""
    lengths = ((512, 1000), (512,), (16, 24))
    works = [
        short(1, (8, 4, 1)),
        short(16, (48, 16, 16)),
        short(32, (64, 32, 32)),
        Work("shared-16", "shared", 16, (24, 16, 16), words=24,
             system=(980, 980, 60), max_tokens=(32, 8, 4), openvino=OPENVINO,
             quick_llama=("B",), quick_openvino=("bf16",)),
        *(bench(f"prefill-{n}t", n, lengths, openvino=OPENVINO)
          for n in (2, 1) if n <= cpus),
        bench("decode", cpus, depths=((0, 1000), (0, 1000), (0, 24))),
        Work("multiturn-8", "multiturn", 8, words=30, max_tokens=(48, 16, 4),
             turns=(5, 3, 2), quick_llama=("B",)),
        Work("tiny-32", "tiny", 32, (1600, 300, 40), max_tokens=(1,)),
        Work("mixed-8", "mixed", 8, words=28, max_tokens=(256, 256, 16),
             long_words=(3900, 3900, 200), every_s=(6, 6, 0.4),
             duration_s=(20, 10, 1), llama=(*SMALL_BATCH, *LLAMA),
             quick_llama=SMALL_BATCH[:1]),
    ]
    return [work.sized(mode) for work in works]


class Questions:
    """The texts of one run: the n-th question is the same for all sides."""

    def __init__(self, work, seed):
        self.work = work
        self.seed = f"{work.kind} {work.clients} {seed}"
        self.system = None
        if work.system:
            self.system = ("You answer questions using this material: "
                           + self._words("system", work.system) + ".")

    def _words(self, what, n):
        rng = random.Random(f"{self.seed} {what}")
        return " ".join(rng.choices(WORDS, k=n))

    def messages(self, i, history=()):
        """Question i, as a chat."""
        system = [{"role": "system", "content": self.system}]
        return [*(system if self.system else []), *history,
                {"role": "user", "content": self._question(i)}]

    def _question(self, i):
        if self.work.kind == "tiny":
            return "Say yes."
        return self._words(f"question {i}", self.work.words) + "?"

    def long_messages(self, i):
        return [{"role": "user", "content": "Summarize: " + self._words(
            f"long {i}", self.work.long_words)}]

"""Workloads: lengths, prompts, conversations.  Everything comes from a seed.

Lengths follow log-normal fits, with the mean prompt and answer of the two data
sets as Kwon et al. give them (arXiv 2309.06180, section 6.1 and figure 11):
ShareGPT 161 and 338 tokens, Alpaca 19 and 58.  The widths (sigma) are chosen so
that the figure's long tail is there: most are short, a few are ten times the
mean.
"""

import math
import random

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"

# name: ((mean, sigma) of the prompt, of the answer)
LENGTHS = {
    "ShareGPT": ((161, 1.0), (338, 0.8)),
    "Alpaca": ((19, 0.5), (58, 0.8)),
}

# ordinary tokens of SmolLM2's vocabulary, no control tokens
TOKENS = range(100, 49000)

WORDS = """the a small large river garden window report letter morning winter
street market number table answer question reason method result value function
error message file line test server request memory page cache model token time
people city country teacher student music colour water mountain road train
bread paper book story friend house light sound plan idea change begin finish
open close read write carry find keep leave bring explain describe compare
between under over after before because although while quickly slowly often
never always perhaps together alone early late green quiet simple careful
""".split()


def random_tokens(rng, n):
    return rng.choices(TOKENS, k=n)


def sentence(rng, n_words):
    words = rng.choices(WORDS, k=n_words)
    return " ".join(words).capitalize() + "."


def draw_length(rng, mean, sigma, most):
    # the mean of a log-normal is exp(mu + sigma²/2)
    mu = math.log(mean) - sigma * sigma / 2
    while True:
        n = round(rng.lognormvariate(mu, sigma))
        if 4 <= n <= most:
            return n


def draw_lengths(rng, name, n, scale=1.0, most=1024):
    """n pairs (prompt tokens, answer tokens)."""
    prompt, answer = LENGTHS[name]
    return [(draw_length(rng, prompt[0] * scale, prompt[1], most),
             draw_length(rng, answer[0] * scale, answer[1], most))
            for _ in range(n)]


def completion(tokens, max_tokens):
    """A request that generates exactly so many tokens."""
    return COMPLETIONS, {"model": "smollm2", "prompt": tokens, "seed": 1,
                         "temperature": 0, "max_tokens": max_tokens,
                         "ignore_eos": True}


def random_requests(rng, lengths):
    return [completion(random_tokens(rng, n_in), n_out)
            for n_in, n_out in lengths]


def chat(messages, max_tokens, exact=False):
    return CHAT, {"model": "smollm2", "messages": messages, "seed": 1,
                  "temperature": 0, "max_tokens": max_tokens,
                  "ignore_eos": exact}


def rag(rng, n_documents, n_questions, n_system=1000, n_document=500,
        n_question=30):
    """Questions about documents behind one system prompt, in random order."""
    system = random_tokens(rng, n_system)
    documents = [random_tokens(rng, n_document) for _ in range(n_documents)]
    order = list(range(n_documents)) * n_questions
    rng.shuffle(order)
    return [system + documents[i] + random_tokens(rng, n_question)
            for i in order]


def cached_by_hand(prompts):
    """Tokens that a cache of whole pages can give each of these prompts when
    they come one after the other: the longest common beginning with an earlier
    one, in pages of 16, at least one token left.  (Not with the answers.)"""
    cached = []
    for i, prompt in enumerate(prompts):
        best = 0
        for other in prompts[:i]:
            same = 0
            for a, b in zip(prompt, other):
                if a != b:
                    break
                same += 1
            best = max(best, same)
        cached.append(min(best, len(prompt) - 1) // 16 * 16)
    return cached


class Conversation:
    """A chat whose next prompt holds all there was, answers included."""

    def __init__(self, rng, system_words, turn_words, max_tokens):
        self.rng = rng
        self.turn_words = turn_words
        self.max_tokens = max_tokens
        self.messages = [{"role": "system",
                          "content": sentence(random.Random(7), system_words)}]

    def next_request(self):
        self.messages.append({"role": "user", "content": sentence(
            self.rng, self.rng.randint(*self.turn_words))})
        return chat(list(self.messages), self.max_tokens)

    def answer(self, text):
        self.messages.append({"role": "assistant", "content": text})


class Agent(Conversation):
    """A transcript that grows by what the tools say: the first turn is the
    task, every later one the result of a call."""

    def next_request(self):
        words = self.rng.randint(*self.turn_words)
        content = sentence(self.rng, words)
        if len(self.messages) > 1:
            content = f"Tool result {len(self.messages) // 2}:\n{content}"
        self.messages.append({"role": "user", "content": content})
        return chat(list(self.messages), self.max_tokens)

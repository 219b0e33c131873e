"""Drives the openai client; prints TAP-like lines.  Usage: URL"""

import sys
import threading

import openai

base = sys.argv[1] + "/v1"
client = openai.OpenAI(base_url=base, api_key="none", max_retries=0)
count = 0
hello = [{"role": "user", "content": "Is water wet? Answer yes or no."}]


def ok(good, name):
    global count
    count += 1
    print(f"{'ok' if good else 'not ok'} {count} - {name}", flush=True)


def raises(kind, name, **kw):
    call = kw.pop("call", client.chat.completions.create)
    kw.setdefault("model", "smollm2")
    try:
        call(**kw)
    except openai.APIError as e:
        ok(type(e) is kind, f"{name}: {kind.__name__}, got {type(e).__name__}")
        return e
    ok(False, f"{name}: nothing was raised")
    return None


answer = client.chat.completions.create(
    model="smollm2", messages=hello, temperature=0, max_tokens=60)
text = answer.choices[0].message.content
ok("water" in text, "chat, not streamed")
ok(answer.usage.completion_tokens > 3, "usage")
ok(answer.choices[0].finish_reason == "stop", "finish_reason")

pieces, usage, reason = [], None, None
for chunk in client.chat.completions.create(
        model="smollm2", messages=hello, temperature=0, max_tokens=60,
        stream=True, stream_options={"include_usage": True}):
    if chunk.usage:
        usage = chunk.usage
    for choice in chunk.choices:
        pieces.append(choice.delta.content or "")
        reason = choice.finish_reason or reason
ok("".join(pieces) == text, "chat, streamed: the same text")
ok(usage.total_tokens == answer.usage.total_tokens
   and usage.prompt_tokens == answer.usage.prompt_tokens,
   "streamed: the same usage")
ok(answer.usage.prompt_tokens_details.cached_tokens
   < usage.prompt_tokens_details.cached_tokens < usage.prompt_tokens,
   "streamed: the prompt was cached")
ok(reason == "stop", "streamed: finish_reason")

lp = client.chat.completions.create(
    model="smollm2", messages=hello, temperature=0, max_tokens=3,
    logprobs=True, top_logprobs=2).choices[0].logprobs
ok(len(lp.content) == 3 and len(lp.content[0].top_logprobs) == 2, "logprobs")

done = client.completions.create(
    model="smollm2", prompt="The capital of France is", temperature=0,
    max_tokens=5)
ok(done.choices[0].text.startswith(" Paris"), "completion")
parts = [c.choices[0].text for c in client.completions.create(
    model="smollm2", prompt="The capital of France is", temperature=0,
    max_tokens=5, stream=True)]
ok("".join(parts) == done.choices[0].text, "completion, streamed")
both = client.completions.create(
    model="smollm2", prompt=["The capital of France is", "One, two,"],
    temperature=0, max_tokens=5, n=2)
ok([c.index for c in both.choices] == [0, 1, 2, 3], "prompts × n")

ok(client.models.list().data[0].id == "smollm2", "models.list")
ok(client.models.retrieve("smollm2").id == "smollm2", "models.retrieve")

# --- errors ---

e = raises(openai.BadRequestError, "temperature", messages=hello,
           temperature=9)
ok(e is not None and e.param == "temperature", "the field is named")
raises(openai.BadRequestError, "no messages", messages=[])
e = raises(openai.NotFoundError, "unknown model", model="gpt-9",
           messages=hello)
ok(e is not None and e.code == "model_not_found", "its code")
e = raises(openai.BadRequestError, "prompt too long",
           messages=[{"role": "user", "content": "word " * 20000}])
ok(e is not None and e.code == "context_length_exceeded", "its code")
raises(openai.NotFoundError, "unknown model on retrieve",
       call=lambda **kw: client.models.retrieve("nope"))
raises(openai.NotFoundError, "unknown path",
       call=lambda **kw: client.post("/nope", cast_to=object))
raises(openai.APIStatusError, "body too large",
       messages=[{"role": "user", "content": "x" * 3000000}])

# --- many at once ---

results = [None] * 32


def one(i):
    parts = []
    for chunk in client.chat.completions.create(
            model="smollm2", messages=hello, temperature=0, max_tokens=60,
            stream=True):
        parts.append(chunk.choices[0].delta.content or "")
    results[i] = "".join(parts)


threads = [threading.Thread(target=one, args=(i,)) for i in range(32)]
for t in threads:
    t.start()
for t in threads:
    t.join()
ok(all(r == text for r in results), "32 threads get the same answer")

# leaving in the middle
stream = client.completions.create(model="smollm2", prompt="Once upon a time",
                                   max_tokens=6000, stream=True,
                                   extra_body={"ignore_eos": True})
next(iter(stream))
stream.close()
ok(True, "a stream can be closed early")

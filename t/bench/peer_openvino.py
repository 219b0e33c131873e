"""OpenVINO GenAI behind standard input and output, one JSON line each way.

    python peer_openvino.py MODEL.gguf '{"INFERENCE_PRECISION_HINT": "bf16"}'

Says {} when the model is loaded, then answers each command with the seconds
that it took, the tokens that were generated and those of the prompts:
{"chats": [messages, …], "max_tokens": N}: a batch; {"random": N, "seed": S,
"max_tokens": M}: one prompt of so many random tokens.  Texts and random tokens
are made before the clock runs.
"""

import json
import os
import random
import sys
import time

CACHE_GB = 4
RANDOM_TOKENS = range(100, 49000)

# the library may print; what it prints must not mix with the answers
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)

import openvino  # noqa: E402 (after the lines above)
import openvino_genai as genai  # noqa: E402


def say(**values):
    answers.write(json.dumps(values) + "\n")
    answers.flush()


def pipeline(model, options):
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = CACHE_GB
    scheduler.enable_prefix_caching = True
    scheduler.max_num_batched_tokens = 2048
    scheduler.max_num_seqs = 64
    scheduler.dynamic_split_fuse = True
    return genai.LLMPipeline(model, "CPU", scheduler_config=scheduler,
                             **options)


def inputs(command, tokenizer):
    if "chats" in command:
        return [tokenizer.apply_chat_template(chat, add_generation_prompt=True)
                for chat in command["chats"]]
    return openvino.Tensor([random.Random(command["seed"]).choices(
        RANDOM_TOKENS, k=command["random"])])


def run(pipe, command):
    config = genai.GenerationConfig()
    config.max_new_tokens = command["max_tokens"]
    config.ignore_eos = True
    config.do_sample = False
    config.apply_chat_template = False
    tokenizer = pipe.get_tokenizer()
    prompts = inputs(command, tokenizer)
    start = time.perf_counter()
    result = pipe.generate(prompts, config)
    seconds = time.perf_counter() - start
    say(seconds=seconds,
        tokens=result.perf_metrics.get_num_generated_tokens(),
        prompt_tokens=sum(tokenizer.encode(p).input_ids.shape[1]
                          for p in prompts) if "chats" in command
        else command["random"])


def main():
    pipe = pipeline(sys.argv[1], json.loads(sys.argv[2]))
    say()
    for line in sys.stdin:
        try:
            run(pipe, json.loads(line))
        except Exception as problem:  # whatever the library may raise
            say(error=f"{type(problem).__name__}: {problem}")


if __name__ == "__main__":
    main()

#!/usr/bin/env bash
#
# Benchmarks: kernels, whole model, worker overhead, drafts.  Printed with
# machine and commit, never judged.  t/run.sh bench builds and calls it; DRAFT
# is a draft model for MODEL.

set -euo pipefail
cd "$(dirname "$0")/../.."

engine=build/llm-engine

echo "commit $(git rev-parse --short HEAD 2>/dev/null || echo none), $(nproc) CPUs, \
$(grep -m 1 'model name' /proc/cpuinfo | cut -d : -f 2)"

for batch in 1 16; do
    "$engine" bench --model "$LLM_TEST_MODEL" --prompt-tokens 512 \
        --batch "$batch" --gen 64 --repeat 5
done

"$engine" bench --model "$LLM_TEST_MODEL" --prompt-tokens 512 --gen 64 \
    --depth 1000 --repeat 5
perl t/bench/overhead.pl
build/t/ops/op_bench
build/t/bench/drafts ${DRAFT:+--draft "$DRAFT"}

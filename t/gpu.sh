#!/usr/bin/env bash
#
# Ten minutes on a machine with a GPU: ops, compute-sanitizer, a model from a
# seed end to end, exactness, speed.  `make gpu-tests` builds what it runs, here
# or elsewhere; the machine needs a driver, no network and no nvcc.
#
#   OUT=DIR bash t/gpu.sh          result in DIR/gpu.json, output in DIR/*.log
#   OUT=DIR bash t/gpu.sh --dry    the same steps, small, over the emulated GPU
#
# A step has its time and fails alone; the rest goes on.  Exit status 1: one has
# failed.  COMPUTE_SANITIZER is the tool's path; LIMIT_S bounds the whole (590);
# LLM_GPU_PLANT=STEP makes that step fail, for a test of this script.

set -uo pipefail
cd "$(dirname "$0")/.."

dry=
[ "${1:-}" = --dry ] && dry=1
OUT=${OUT:-gpu-out}
mkdir -p "$OUT"
end=$((SECONDS + ${LIMIT_S:-590}))
records=()
failed=0

if [ -n "$dry" ]; then
    build=${LLM_TEST_BUILD:-build}
    engine=$build/emu/llm-engine
    like=(--like smollm2-135m --layers 1 --vocab 600 --context 256)
    types=(q4_0)
    speed=(--prompt-tokens 8 --gen 2 --repeat 1)
    device=emulated
else
    build=${LLM_TEST_BUILD:-build-gpu}
    engine=$build/llm-engine
    like=(--like llama-3.2-1b --context 4096)
    types=(bf16 q4_0)
    speed=(--prompt-tokens 512 --gen 64 --repeat 3)
    device=$(nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null \
        | head -n 1)
fi

ops=(op_test fine_test weight_test) # those that open the GPU
sanitizer=${COMPUTE_SANITIZER:-$(command -v compute-sanitizer)}

# record NAME STATUS SECONDS WHY
record() {
    records+=("{\"step\": \"$1\", \"status\": \"$2\", \"seconds\": $3, \
\"why\": \"$4\"}")
    printf '%-28s %-8s %4d s  %s\n' "$1" "$2" "$3" "$4"
}

# step NAME SECONDS COMMAND…: within what is left of the whole
step() {
    local name=$1 limit=$2 left=$((end - SECONDS)) began=$SECONDS status=0
    shift 2

    if [ "$left" -lt 2 ]; then
        failed=1
        record "$name" failed 0 "no time was left"
        return 1
    fi

    [ "$limit" -gt "$left" ] && limit=$left
    [ "${LLM_GPU_PLANT:-}" = "$name" ] && set -- false

    timeout -k 5 "$limit" "$@" >"$OUT/$name.log" 2>&1 || status=$?

    if [ "$status" = 0 ]; then
        record "$name" passed $((SECONDS - began)) ""
        return 0
    fi

    failed=1
    if [ "$status" = 124 ] || [ "$status" = 137 ]; then
        record "$name" failed $((SECONDS - began)) "over $limit s"
    else
        record "$name" failed $((SECONDS - began)) "exit status $status"
    fi
    return 1
}

# --- the model, and what it says whatever the cuts ---

generate() {
    "$engine" generate --model "$OUT/q4_0.gguf" --device cuda \
        --prompt "a b c d e f g h i j k l m n o p q r s t u v w x y z" \
        --max-tokens 12 --ignore-eos --temperature 0 --max-model-len 256 \
        --kv-cache-memory 64m --max-num-seqs 4 "$@" 2>"$OUT/generate.err" \
        || { cat "$OUT/generate.err"; return 1; }
}

# one chunk against many, twice the same, for both types of KV
exactness() {
    local kv rows want got

    for kv in f16 q8_0; do
        want=$(generate --kv-cache-dtype "$kv" --max-num-batched-tokens 256) \
            || return 1
        [ -n "$want" ] || return 1
        for rows in 16 7 256; do
            got=$(generate --kv-cache-dtype "$kv" \
                --max-num-batched-tokens "$rows") || return 1
            echo "$kv, $rows rows: $got"
            [ "$got" = "$want" ] || { echo "alone: $want"; return 1; }
        done
    done
}

# drafts of each kind change nothing, greedy or drawn, and some are right, some
# wrong; the model drafts for itself
speculation() {
    local heat how want got count right=0 all=0
    local short=(--prompt "a b a b a b" --max-tokens 16 --seed 5)

    for heat in 0 0.8; do
        want=$(generate "${short[@]}" --temperature "$heat") || return 1
        [ -n "$want" ] || return 1
        for how in "--speculative ngram:1:3" \
            "--speculative-model $OUT/q4_0.gguf"; do
            # shellcheck disable=SC2086
            got=$(generate "${short[@]}" --temperature "$heat" $how \
                --num-speculative-tokens 3 --log-level info) || return 1
            count=$(sed -n 's/.* \([0-9]* of [0-9]*\) drafts right$/\1/p' \
                "$OUT/generate.err")
            echo "temperature $heat, $how, $count drafts right: $got"
            [ "$got" = "$want" ] || { echo "without: $want"; return 1; }
            right=$((right + ${count% of *}))
            all=$((all + ${count#* of }))
        done
    done

    [ "$right" -gt 0 ] && [ "$right" -lt "$all" ]
}

# GB/s of the data sheet
bandwidth() {
    case $device in
    *H200*) echo 4800 ;;
    *H100*) echo 3350 ;;
    *A100*80GB*) echo 2039 ;;
    *) echo 0 ;;
    esac
}

benchmark() {
    "$engine" bench --model "$OUT/$1.gguf" --device cuda "${speed[@]}" \
        --max-model-len 256$([ -z "$dry" ] && echo 0) --kv-cache-memory \
        "$([ -n "$dry" ] && echo 64m || echo 4g)"
}

# a test of t/ops or t/cuda; none may find no GPU and be content
ops() {
    local out status=0

    out=$("$build/t/$1" 2>&1) || status=$?
    echo "$out"
    [ "$status" = 0 ] && grep -q '^ok 1 ' <<<"$out" \
        && ! grep -q SKIP <<<"$out"
}

export -f generate exactness speculation benchmark ops
export OUT engine dry build

step device 20 "$engine" plan --like llama-3.2-1b --memory 80GB
[ -n "$dry" ] || step driver 20 nvidia-smi

for name in "${ops[@]}"; do
    step "ops-$name" 120 bash -c "ops ops/$name"
done

# kernels of attention and of the pool
for name in attn_test kv_test; do
    if [ -n "$dry" ]; then
        record "cuda-$name" skipped 0 "t/cuda/$name is a test of its own"
    else
        step "cuda-$name" 60 bash -c "ops cuda/$name"
    fi
done

# the small suite: prefill and decode of one layer, so every kernel of a step
step synth-small 30 "$engine" synth --like smollm2-135m --layers 1 --vocab 600 \
    --context 256 --type q4_0 --seed 1 --out "$OUT/small.gguf"
small=("$engine" generate --model "$OUT/small.gguf" --device cuda
       --prompt "a b c d e f g h i j k l m n o p" --max-tokens 4 --ignore-eos
       --temperature 0 --max-model-len 256 --kv-cache-memory 16m)

for tool in memcheck racecheck synccheck initcheck; do
    if [ -n "$dry" ]; then
        step "$tool" 60 env LLM_SHIM_SEED="${#tool}" "${small[@]}"
    elif [ -n "$sanitizer" ]; then
        step "$tool" 60 "$sanitizer" --tool "$tool" --error-exitcode 9 \
            "${small[@]}"
    else
        record "$tool" skipped 0 "no compute-sanitizer"
    fi
done

for type in "${types[@]}"; do
    step "synth-$type" 60 "$engine" synth "${like[@]}" --type "$type" \
        --seed 1 --out "$OUT/$type.gguf"
done

step end-to-end 60 bash -c generate
step exactness 90 bash -c exactness
step speculation 90 bash -c speculation

if [ -n "$dry" ]; then
    record batches skipped 0 "t/unit/cuda_engine_test is a test of its own"
    record draws skipped 0 "t/unit/cuda_draw_test is a test of its own"
else
    # of the size that the test's pages are counted for
    step synth-batches 30 "$engine" synth --like smollm2-135m --type q4_0 \
        --seed 1 --out "$OUT/batches.gguf"
    step batches 60 env LLM_TEST_LONG=1 \
        LLM_TEST_MODEL="${LLM_TEST_MODEL:-$OUT/batches.gguf}" \
        "$build/t/unit/cuda_engine_test"
    step draws 60 "$build/t/unit/cuda_draw_test"
fi

speeds=()
for type in "${types[@]}"; do
    if step "bench-$type" 90 bash -c "speed=(${speed[*]}); benchmark $type"; then
        # the median of decode, and the bytes that a token reads
        rate=$(sed -n '/^decode/s/ tok.*//p' "$OUT/bench-$type.log" \
            | awk '{ print $(NF - 1) }')
        most=$("$engine" plan --model "$OUT/$type.gguf" --memory 400GB \
            --context 128 --mean-tokens 32 --bandwidth 1000000 \
            | sed -n 's/^ *1 request *\([0-9.]*\) tok.*/\1/p')
        speeds+=("$(awk -v t="$type" -v r="$rate" -v m="$most" \
            -v b="$(bandwidth)" 'BEGIN {
                gbs = m > 0 ? r * 1e6 / m : 0
                printf "{\"type\": \"%s\", \"tokens_per_s\": %.1f, ", t, r
                share = (b > 0) ? sprintf("%.3f", gbs / b) : "null"
                printf "\"gb_per_s\": %.4f, \"of_bandwidth\": %s}", gbs, share
            }')")
    fi
done

rm -f "$OUT/small.gguf" "$OUT/batches.gguf"

for type in "${types[@]}"; do
    rm -f "$OUT/$type.gguf"
done

join() {
    local IFS=,
    echo "$*"
}

cat >"$OUT/gpu.json" <<END
{"device": "$device", "dry": ${dry:-0}, "seconds": $SECONDS,
 "failed": $failed, "steps": [$(join "${records[@]}")],
 "speed": [$(join "${speeds[@]}")]}
END

exit "$failed"

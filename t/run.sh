#!/usr/bin/env bash
#
# Installs what the tests need, builds, and runs them through prove:
#
#   bash t/run.sh          everything (what CI runs)
#   bash t/run.sh test     the everyday set: no sanitizers, no long matrices
#   bash t/run.sh lint     clang-tidy, cppcheck and the house-keeping tests
#   bash t/run.sh bench    benchmarks, printed, never judged
#   bash t/run.sh bench-article [--quick]    paging, caching, chunking: a table
#   PEER=DIR bash t/run.sh bench-peer [--quick]    against llama.cpp, in turn
#   bash t/run.sh bench-roofline [MODEL.gguf]    kernels against the machine
#
# STATE_DIR chooses the folder of model and Python packages.

set -euo pipefail
. "$(dirname "$0")/../conf/lib.sh"

# paths are meant from where this was called
for name in PEER LOAD; do
    if [ -n "${!name:-}" ]; then
        export "$name=$(realpath "${!name}")"
    fi
done

cd "$TOP"
what=${1:-check}

# shellcheck disable=SC2086
need_packages $BUILD_PACKAGES perl python3 python3-venv libcmocka-dev \
    g++ clang-14 libclang-rt-14-dev clang-format-14 spin nghttp2-client \
    prometheus

# Python packages of the tests, in a folder of their own
test_python() {
    local venv=$STATE_DIR/venv wanted="openai jinja2 numpy"

    # they read compiled kernels
    if command -v nvcc /usr/local/cuda/bin/nvcc >/dev/null; then
        wanted+=" nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm"
    fi

    if [ "$(cat "$venv/wanted" 2>/dev/null)" != "$wanted" ]; then
        say "installing Python packages: $wanted"
        rm -rf "$venv"
        /usr/bin/python3 -m venv "$venv"
        # shellcheck disable=SC2086
        "$venv/bin/pip" -q --disable-pip-version-check install $wanted
        echo "$wanted" >"$venv/wanted"
    fi

    export LLM_TEST_PYTHON=$venv/bin/python
}

if [ -n "${MODEL:-}" ]; then
    MODEL=$(realpath "$MODEL")
else
    fetch_model
fi

export LLM_TEST_MODEL=$MODEL

case $what in
lint)
    need_packages clang-tidy-14 cppcheck
    prove -v t/00_layers.t t/01_style.t t/02_docs.t
    exec bash t/tools/lint.sh
    ;;
bench)
    build all ops build/t/bench/drafts
    exec bash t/bench/run.sh
    ;;
bench-article)
    build all
    exec python3 t/bench/article.py "${@:2}"
    ;;
bench-roofline)
    build build/t/ops/roofline
    exec build/t/ops/roofline "${@:2}"
    ;;
bench-peer)
    [ -x "${PEER:-}/llama-server" ] && [ -x "$PEER/llama-bench" ] \
        || die "PEER: give the folder that has llama-server and llama-bench"
    build all
    exec python3 t/bench/peer.py "${@:2}"
    ;;
test | check)
    ;;
*)
    die "usage: bash t/run.sh [check|test|lint|bench|bench-article|bench-peer|\
bench-roofline]"
    ;;
esac

test_python
# of all GPUs that a release is for, two: each takes a minute of nvcc
export CUDA_ARCHS=${CUDA_ARCHS:-80 90}
build all units ops tools shim cuda-tests emu build/t/bench/drafts

tests=(t/*.t build/t/unit/*_test build/t/ops/*_test build/t/shim/*_test
       build/t/cuda/*_test)

if [ "$what" = check ]; then
    export LLM_TEST_LONG=1
    build SAN=address,undefined all units ops shim cuda-tests
    build SAN=thread BUILD=build-thread units ops shim cuda-tests
    build CC=clang-14 BUILD=build-fuzz SAN=fuzzer-no-link,address,undefined \
        fuzz
    tests+=(build-address,undefined/t/unit/*_test build-thread/t/unit/ipc*_test
            build-thread/t/unit/engine_thread*_test)

    # every suite of kernels, in the small sets of t/ops/lib/small.h
    for b in build-address,undefined build-thread; do
        tests+=("$b"/t/shim/*_test "$b"/t/cuda/*_test "$b"/t/ops/*_test)
    done
fi

# the matrix unit's twin: much of it every day, and all of it in a check
build twins
tests+=(build/twin/{twin,tile,point,engine_amx}_test)

if [ "$what" = check ]; then
    build SAN=address,undefined build-address,undefined/twin/{twin,tile}_test
    tests+=(build/twin/{op,fine,weight}_test
            build-address,undefined/twin/{twin,tile}_test)
fi

for t in "${tests[@]}"; do
    [ -x "$t" ] || die "$t is not executable: prove would stop there"
done

# Each test is a program of its own: Perl scripts by their first line.  One at
# a time: two engines with a thread for each processor take longer than one
# after the other.
exec prove --timer --exec '' "${tests[@]}"

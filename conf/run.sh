#!/usr/bin/env bash
#
# Builds everything and starts NGINX with a model, on a fresh Debian 12 too:
#
#   bash conf/run.sh         start (or restart after a change)
#   bash conf/run.sh stop    stop
#
# PORT=8080, MODEL=FILE.gguf and STATE_DIR=FOLDER in the environment choose the
# port, another model, and the folder for everything it writes.

set -euo pipefail
. "$(dirname "$0")/lib.sh"

RUN=$STATE_DIR/run

running() {
    [ -f "$RUN/nginx.pid" ] && kill -0 "$(cat "$RUN/nginx.pid")" 2>/dev/null
}

stop() {
    local pid i

    running || return 0
    pid=$(cat "$RUN/nginx.pid")
    kill -QUIT "$pid"

    for ((i = 0; i < 100; i++)); do
        kill -0 "$pid" 2>/dev/null || return 0
        # streams had five seconds to end
        [ "$i" = 50 ] && kill -TERM "$pid" 2>/dev/null
        sleep 0.1
    done

    kill -KILL "$pid" 2>/dev/null || true
}

port_taken() {
    (exec 3<>"/dev/tcp/127.0.0.1/$1") 2>/dev/null
}

case ${1:-start} in
start)
    ;;
stop)
    if running; then
        stop
        say "stopped"
    else
        say "not running"
    fi
    exit 0
    ;;
*)
    die "usage: bash conf/run.sh [start|stop]"
    ;;
esac

# shellcheck disable=SC2086
need_packages $BUILD_PACKAGES

if [ -n "${MODEL:-}" ]; then
    [ -r "$MODEL" ] || die "MODEL=$MODEL cannot be read"
    MODEL=$(realpath "$MODEL")
else
    fetch_model
fi

# nvcc takes minutes, for nothing where there is no GPU
[ -e /dev/nvidiactl ] || [ -e /dev/dxg ] || export CUDA="${CUDA:-0}"

build BUILD="$STATE_DIR/build" all
stop

mkdir -p "$RUN/logs" "$RUN/tmp"
cp -f "$STATE_DIR"/build/{llm-engine,ngx_http_llm_module.so} "$RUN/"

asked=${PORT:-8080}
port=$asked

while port_taken "$port"; do
    port=$((port + 1))
    [ "$port" -lt $((asked + 100)) ] || die "no free port from $asked on"
done

[ "$port" = "$asked" ] || say "port $asked is taken, using $port"

# conf/nginx.conf with this machine's paths and port
{
    echo "pid $RUN/nginx.pid;"
    echo "error_log $RUN/logs/error.log notice;"
    [ "$(id -u)" != 0 ] || echo "user www-data;"
    sed -e "s|modules/ngx_http_llm_module.so|$RUN/ngx_http_llm_module.so|" \
        -e "s|model /var/lib/llm/model.gguf;|model $MODEL;\n\
        program $RUN/llm-engine;|" \
        -e "s|listen 8080;|listen $port;|" \
        -e "s|^http {|http {\n    access_log $RUN/logs/access.log;\n\
    client_body_temp_path $RUN/tmp/body;\n\
    proxy_temp_path $RUN/tmp/proxy;\n\
    fastcgi_temp_path $RUN/tmp/fastcgi;\n\
    uwsgi_temp_path $RUN/tmp/uwsgi;\n\
    scgi_temp_path $RUN/tmp/scgi;|" \
        "$TOP/conf/nginx.conf"
} >"$RUN/nginx.conf"

say "starting nginx on port $port"
nginx -p "$RUN" -c "$RUN/nginx.conf" -e "$RUN/logs/error.log"

ready=

for ((i = 0; i < 300; i++)); do
    if curl -sf "http://127.0.0.1:$port/health" >/dev/null; then
        ready=yes
        break
    fi
    sleep 0.1
done

if [ -z "$ready" ]; then
    tail -n 20 "$RUN/logs/error.log" >&2
    die "the engine is not ready after 30 s; see $RUN/logs/error.log"
fi

cat <<EOF
== ready.  Try:

curl -N http://127.0.0.1:$port/v1/chat/completions \\
    -H 'Content-Type: application/json' \\
    -d '{"stream": true, "messages": [{"role": "user", "content": "Hello!"}]}'

stop with: bash conf/run.sh stop
EOF

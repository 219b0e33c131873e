#!/bin/bash
# Builds the dynamic module against an nginx source tree, or the headers of
# Debian's nginx-dev, out of tree: $BUILD/ngx_http_llm_module.so.
#
#   BUILD       build folder (default: build)
#   SAN         sanitizers, as in the Makefile
#   NGINX_SRC   where nginx's configure is (default: /usr/share/nginx/src)
#
# configure takes most of the time, so it runs only when `config` has changed.

set -e

TOP=$(cd "$(dirname "$0")/.." && pwd)
BUILD=${BUILD:-build}
NGINX_SRC=${NGINX_SRC:-/usr/share/nginx/src}

case $BUILD in
    /*) OUT=$BUILD ;;
    *)  OUT=$TOP/$BUILD ;;
esac

OBJS=$OUT/nginx

if [ ! -d "$NGINX_SRC" ]; then
    echo "$0: no nginx sources in $NGINX_SRC:" \
         "install nginx-dev or set NGINX_SRC" >&2
    exit 1
fi

mkdir -p "$OBJS"

if [ ! -f "$OBJS/Makefile" ] || [ "$TOP/config" -nt "$OBJS/Makefile" ]; then
    rm -f "$OBJS/Makefile"

    NGX_CONF_FLAGS=(--with-compat)
    if [ -f "$NGINX_SRC/conf_flags" ]; then
        . "$NGINX_SRC/conf_flags"
    fi

    configure=configure
    if [ ! -f "$NGINX_SRC/configure" ]; then
        configure=auto/configure
    fi

    if ! (cd "$NGINX_SRC" \
          && bash ./$configure --with-cc-opt="-g -O2 -fPIC" \
                  --with-ld-opt="-fPIC" "${NGX_CONF_FLAGS[@]}" \
                  --add-dynamic-module="$TOP" --builddir="$OBJS") \
         > "$OBJS/configure.log" 2>&1
    then
        tail -n 20 "$OBJS/configure.log" >&2
        rm -f "$OBJS/Makefile"
        exit 1
    fi
fi

CC=${CC:-cc}
if [ -n "$SAN" ]; then
    CC="$CC -fsanitize=$SAN -fno-omit-frame-pointer"
fi

make -s -f "$OBJS/Makefile" -C "$NGINX_SRC" CC="$CC" LINK="$CC" modules

if ! cmp -s "$OBJS/ngx_http_llm_module.so" "$OUT/ngx_http_llm_module.so"; then
    cp "$OBJS/ngx_http_llm_module.so" "$OUT/ngx_http_llm_module.so.new"
    mv "$OUT/ngx_http_llm_module.so.new" "$OUT/ngx_http_llm_module.so"
fi

#!/usr/bin/env bash
# clang-tidy and cppcheck over our own sources; fails on any finding.

set -euo pipefail
cd "$(dirname "$0")/../.."

flags="-std=c11 -D_GNU_SOURCE -I."
checks='-*,readability-braces-around-statements,bugprone-*'

# what these find here is meant: counts beside pointers, exact integer halves,
# signed weights, texts that carry their length
for c in easily-swappable-parameters narrowing-conversions \
    reserved-identifier implicit-widening-of-multiplication-result \
    assignment-in-if-condition macro-parentheses sizeof-expression \
    signed-char-misuse integer-division not-null-terminated-result
do
    checks+=",-bugprone-$c"
done

status=0

for f in engine/*.c engine/*/*.c kernels/*.c kernels/op/*.c kernels/ref/*.c; do
    # shellcheck disable=SC2086
    clang-tidy-14 --quiet --checks="$checks" --warnings-as-errors='*' "$f" \
        -- $flags 2>/dev/null || status=1
done

cppcheck --quiet --std=c11 --enable=warning,portability --inline-suppr \
    --suppress=returnDanglingLifetime --suppress=uninitvar \
    --suppress=missingIncludeSystem --suppress=normalCheckLevelMaxBranches \
    --error-exitcode=1 -D_GNU_SOURCE -I. engine kernels/op kernels/ref \
    || status=1

exit $status

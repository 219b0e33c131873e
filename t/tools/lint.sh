#!/usr/bin/env bash
# clang-tidy and cppcheck over our own sources; fails on any finding.

set -euo pipefail
cd "$(dirname "$0")/../.."

flags="-std=c11 -D_GNU_SOURCE -I."
checks='-*,readability-braces-around-statements,bugprone-*,-bugprone-easily-swappable-parameters,-bugprone-narrowing-conversions,-bugprone-reserved-identifier,-bugprone-implicit-widening-of-multiplication-result,-bugprone-assignment-in-if-condition,-bugprone-macro-parentheses'

status=0

for f in engine/*.c engine/*/*.c kernels/*.c kernels/op/*.c kernels/ref/*.c; do
    # shellcheck disable=SC2086
    clang-tidy-14 --quiet --checks="$checks" --warnings-as-errors='*' "$f" \
        -- $flags 2>/dev/null || status=1
done

cppcheck --quiet --std=c11 --enable=warning,portability --inline-suppr \
    --suppress=missingIncludeSystem --suppress=normalCheckLevelMaxBranches \
    --error-exitcode=1 -D_GNU_SOURCE -I. engine kernels/op kernels/ref \
    || status=1

exit $status

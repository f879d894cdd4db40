#!/usr/bin/env bash
# All tests and documentation examples; then those that were not run, with the reason each gives.
set -euo pipefail
cd "$(dirname "$0")/.."
log=$(mktemp)
trap 'rm -f "$log"' EXIT
cargo test --no-fail-fast --features sim 2>&1 | tee "$log"
echo '-- not run:'
grep -E ' \.\.\. ignored' "$log" || echo 'none'

#!/usr/bin/env bash
# The models: every order in which threads can take turns with what they share, tried out (loom).
#
# They are the library's tests with `models` in their names. Under `--cfg loom` what `src/sync.rs` gives out are loom's
# atomics, so nothing else can run: hence a build of their own. To see where one fails: LOOM_LOG=trace, and
# LOOM_CHECKPOINT_FILE (loom's documentation).
set -euo pipefail
cd "$(dirname "$0")/.."
export RUSTFLAGS='--cfg loom' CARGO_TARGET_DIR=target/models
log=$(mktemp)
trap 'rm -f "$log"' EXIT
cargo test --quiet --features sim --lib models -- --nocapture 2>&1 | tee "$log"
# A filter that finds nothing passes too.
grep -qE '^test result: ok\. [1-9][0-9]* passed' "$log" || { echo 'no model was run'; exit 1; }

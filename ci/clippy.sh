#!/usr/bin/env bash
# Clippy without a warning: no features, the default ones, the simulated driver alone, all of them.
set -euo pipefail
cd "$(dirname "$0")/.."
for features in --no-default-features '' '--no-default-features --features sim' --all-features; do
    echo "-- ${features:-default features}"
    # shellcheck disable=SC2086 # several words on purpose
    cargo clippy --quiet --all-targets $features -- -D warnings
done

#!/usr/bin/env bash
# Clippy without a warning: no features, the default ones, the simulated driver alone, all of them; and the fuzz tree.
set -euo pipefail
cd "$(dirname "$0")/.."
broken=0

# All sets are looked at, so that one run shows everything.
look() { cargo clippy --quiet --keep-going --all-targets --target-dir target "$@" -- -D warnings || broken=1; }

for features in --no-default-features '' '--no-default-features --features sim' --all-features; do
    echo "-- ${features:-default features}"
    # shellcheck disable=SC2086 # several words on purpose
    look $features
done
echo '-- fuzz'
look --manifest-path fuzz/Cargo.toml
exit $broken

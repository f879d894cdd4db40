#!/usr/bin/env bash
# Documentation without a warning and without a broken link, with no features and with all.
set -euo pipefail
cd "$(dirname "$0")/.."
export RUSTDOCFLAGS='-D warnings'
for features in --no-default-features --all-features; do
    echo "-- $features"
    cargo doc --quiet --no-deps $features
done

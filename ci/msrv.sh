#!/usr/bin/env bash
# The oldest compiler that the manifest promises, if it is installed.
set -euo pipefail
cd "$(dirname "$0")/.."
oldest=$(sed -n 's/^rust-version = "\(.*\)"$/\1/p' Cargo.toml)
if ! rustup run "$oldest" cargo --version 2>/dev/null; then
    echo "skipped: Rust $oldest is not installed (rustup toolchain install $oldest --profile minimal)"
    exit
fi
# The library alone: tools that only tests use may ask for more.
rustup run "$oldest" cargo check --quiet --all-features

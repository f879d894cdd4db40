#!/usr/bin/env bash
# Formatting, of the crate and of the fuzz tree.
set -euo pipefail
cd "$(dirname "$0")/.."
cargo fmt --all --check
cargo fmt --manifest-path fuzz/Cargo.toml --check -- --config-path rustfmt.toml

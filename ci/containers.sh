#!/usr/bin/env bash
# A crate that depends on this one: its containers on the host, a simulated card, the HIP stand-in, and a card if there is one.
set -euo pipefail
cd "$(dirname "$0")/.."
crate=examples/gpu-containers/Cargo.toml
cargo fmt --manifest-path $crate --check -- --config-path rustfmt.toml
cargo clippy --quiet --all-targets --manifest-path $crate --target-dir target -- -D warnings
cargo build --quiet -p fake-amdhip
GROWSPAN_HIP_LIBRARY=$PWD/target/debug/libfake_amdhip.so FAKE_AMDHIP=7.14.1 \
    cargo test --quiet --manifest-path $crate --target-dir target -- --nocapture

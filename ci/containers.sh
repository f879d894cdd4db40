#!/usr/bin/env bash
# A crate that depends on this one: its containers on the host, a simulated card, the HIP stand-in, and a card if there is one.
set -euo pipefail
cd "$(dirname "$0")/.."
crate=examples/gpu-containers/Cargo.toml
cargo fmt --manifest-path $crate --check -- --config-path rustfmt.toml
cargo clippy --quiet --all-targets --manifest-path $crate --target-dir target -- -D warnings
cargo build --quiet -p fake-amdhip
GROWSPAN_HIP_LIBRARY=$PWD/target/debug/libfake_amdhip.so FAKE_AMDHIP=7.14.1 GROWSPAN_HIP_KERNEL=3.64 \
    cargo test --quiet --manifest-path $crate --target-dir target -- --nocapture

# std's own `Allocator`, whatever it is in this compiler: not stable, so only these two crates may use it. A build of its own.
log=$(mktemp)
trap 'rm -f "$log"' EXIT
RUSTFLAGS='--cfg growspan_std_allocator' RUSTC_BOOTSTRAP=growspan,std_collections \
    cargo test --quiet --manifest-path $crate --target-dir target/std-allocator --test std_collections 2>&1 | tee "$log"
# Without the cfg the file is empty, and passes too.
grep -qE '^test result: ok\. [1-9][0-9]* passed' "$log" || { echo 'std'\''s collections were not tried'; exit 1; }

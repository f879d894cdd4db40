#!/usr/bin/env bash
# Fuzzing: inputs that once failed, some that chance would be long in finding, random ones from a fixed seed, then a minute (FUZZ_SECONDS) with coverage.
#
# libFuzzer on the stable compiler, without cargo-fuzz: what that adds here are these flags. To go on for longer, with a
# corpus that is kept: `FUZZ_SECONDS=3600 FUZZ_RACES=1 ci/fuzz.sh`. To read an input: `cargo run --bin show -- FILE` in fuzz/.
set -euo pipefail
cd "$(dirname "$0")/.."
cargo test --quiet --manifest-path fuzz/Cargo.toml --target-dir target

coverage=(-Cpasses=sancov-module)
for argument in level=4 inline-8bit-counters pc-table trace-compares; do
    coverage+=("-Cllvm-args=-sanitizer-coverage-$argument")
done
target=$(rustc -vV | sed -n 's/^host: //p')
# With a target named, the flags are not those of build scripts and proc macros, which have nobody to report to.
RUSTFLAGS="${coverage[*]} --cfg fuzzing" cargo build --quiet --release --bin buffers --target "$target" \
    --manifest-path fuzz/Cargo.toml --target-dir target

mkdir -p fuzz/corpus/buffers fuzz/artifacts
"target/$target/release/buffers" fuzz/corpus/buffers fuzz/regressions fuzz/seeds -artifact_prefix=fuzz/artifacts/ \
    -max_total_time="${FUZZ_SECONDS:-60}" -max_len=1024 -len_control=0 -timeout=10 -print_final_stats=1 -verbosity=0

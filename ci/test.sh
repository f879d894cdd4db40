#!/usr/bin/env bash
# The tests of the build without optional features. Those of the default and of the simulated driver: ci/readme.sh.
set -euo pipefail
cd "$(dirname "$0")/.."
cargo test --quiet --no-fail-fast --no-default-features

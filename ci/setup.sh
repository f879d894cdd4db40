#!/usr/bin/env bash
# Installs what the other scripts need and is missing: compilers, python3, clippy, rustfmt.
set -euo pipefail

packages=()
command -v cc >/dev/null || packages+=(gcc libc6-dev)
command -v c++ >/dev/null || packages+=(g++)
command -v python3 >/dev/null || packages+=(python3)
command -v git >/dev/null || packages+=(git)
if ((${#packages[@]})); then
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${packages[@]}"
fi
cargo clippy --version 2>/dev/null || rustup component add clippy
cargo fmt --version 2>/dev/null || rustup component add rustfmt

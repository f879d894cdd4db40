#!/usr/bin/env bash
# The examples, small, on host memory: they end well, and what they print as JSON is JSON.
set -euo pipefail
cd "$(dirname "$0")/.."
small=(--device host --slots 4 --max-context 2048 --bytes-per-token 1KiB --requests 40)

example() { cargo run --quiet --features sim --example "$@"; }
is_json() { python3 -m json.tool >/dev/null && echo 'JSON: valid'; }

example doctor
example doctor -- --json | is_json
for policy in ladder uniform:2MiB exact; do
    example kv_cache -- "${small[@]}" --policy "$policy"
done
example kv_cache -- "${small[@]}" --contiguous
example kv_cache -- "${small[@]}" --json | is_json

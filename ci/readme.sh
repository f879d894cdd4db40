#!/usr/bin/env bash
# The commands of the README that are marked to be run, as they stand there.
#
# A command is marked by a comment line of its own before its block:
#     <!-- ci: main job -->
#     ```sh
#     cargo run --release --example kv_cache
#     ```
set -euo pipefail
cd "$(dirname "$0")/.."

blocks=$(mktemp -d)
trap 'rm -rf "$blocks"' EXIT
awk -v folder="$blocks" '
    /^<!-- ci: .* -->$/ { name = $0; gsub(/^<!-- ci: | -->$/, "", name); next }
    name && /^```sh$/   { file = sprintf("%s/%02d %s", folder, ++count, name); printf "" > file; name = ""; next }
    /^```/              { file = "" }
    file                { print > file }
' README.md

found=("$blocks"/*)
[[ -e ${found[0]} ]] || { echo 'README.md marks no command'; exit 1; }
for block in "${found[@]}"; do
    printf -- '-- %s\n' "$(basename "$block")"
    sed 's/^/$ /' "$block"
    bash -euo pipefail "$block"
done

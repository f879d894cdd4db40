#!/usr/bin/env bash
# The commands that the README marks, as they stand there: the main job and all tests; then the tests that were not run.
#
# A command is marked by a comment line of its own before its block:
#     <!-- ci: main job -->
#     ```sh
#     cargo run --release --example kv_cache
#     ```
# The tests run the examples too, and what they print as JSON is read back there.
set -euo pipefail
cd "$(dirname "$0")/.."

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir "$work/blocks"
awk -v folder="$work/blocks" '
    /^<!-- ci: .* -->$/ { name = $0; gsub(/^<!-- ci: | -->$/, "", name); next }
    name && /^```sh$/   { file = sprintf("%s/%02d %s", folder, ++count, name); printf "" > file; name = ""; next }
    /^```/              { file = "" }
    file                { print > file }
' README.md

for needed in 'main job' 'tests'; do
    blocks=("$work"/blocks/??" $needed")
    [[ -e ${blocks[0]} ]] || { echo "README.md marks no command as '<!-- ci: $needed -->'"; exit 1; }
done
broken=0
for block in "$work"/blocks/*; do
    printf -- '-- %s\n' "$(basename "$block")"
    sed 's/^/$ /' "$block"
    # All are run, so that one run shows everything.
    bash -euo pipefail "$block" 2>&1 | tee -a "$work/log" || broken=1
done
echo '-- tests not run:'
grep -E '^test .* \.\.\. ignored' "$work/log" || echo 'none'
exit $broken

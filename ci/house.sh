#!/usr/bin/env bash
# House rules: short files, nothing unfinished, nothing of one machine in the tree, lock files that fit.
set -euo pipefail
cd "$(dirname "$0")/.."
broken=0

# `rule TEXT COMMAND...`: what the command prints, if anything, breaks the rule.
rule() {
    local found
    found=$("${@:2}" || true)
    [[ -n $found ]] || return 0
    printf 'broken: %s\n%s\n' "$1" "$found"
    broken=1
}

long_files() { git ls-files -z src | xargs -0 wc -l | awk '$2 != "total" && $1 > 600'; }
other_registries() { git grep -n '^source = ' -- '*.lock' | grep -v 'registry+https://github.com/rust-lang/crates.io-index'; }
stale_locks() {
    for tree in . fuzz; do
        cargo metadata --locked --quiet --format-version 1 --manifest-path $tree/Cargo.toml 2>&1 >/dev/null
    done
}

rule 'no file in src has more than 600 lines' long_files
rule 'nothing is unfinished' git grep -nE '\b(todo|unimplemented|dbg)!' -- '*.rs'
rule 'no path of one machine' git grep -nIE '(^|[[:space:]"`=(])/(home|root|work|Users)/' -- . ':!ci/house.sh'
rule 'lock files name public registries only' other_registries
rule 'lock files fit their manifests' stale_locks
exit $broken

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
# Where packages come from is each machine's own setting: no registry, mirror or proxy is named, by whatever tool's key.
registries() {
    local keys='replace-with|^\[(source|registries|registry)[].]|sparse\+|index[-_]url|(PIP_INDEX|GOPROXY|REGISTRY)[A-Z_]*='
    local hosts='https?://([^/]*@|[0-9]+\.[0-9]+\.|localhost|[^/]*(:[0-9]+|artifactory|nexus|mirror|proxy|\.internal|\.local))'
    git grep -nIiE "$keys|$hosts" -- . ':!*.lock' ':!ci/house.sh'
}
stale_locks() {
    for tree in . fuzz examples/gpu-containers; do
        cargo metadata --locked --quiet --format-version 1 --manifest-path $tree/Cargo.toml 2>&1 >/dev/null
    done
}

rule 'no file in src has more than 600 lines' long_files
rule 'nothing is unfinished' git grep -nE '\b(todo|unimplemented|dbg)!' -- '*.rs'
rule 'no path of one machine' git grep -nIE '(^|[[:space:]"`=(])/((home|root|Users)/|(work|farm)($|[^[:alnum:]]))' -- . ':!ci/house.sh'
rule 'no registry, mirror or proxy' registries
rule 'lock files name public registries only' other_registries
rule 'lock files fit their manifests' stale_locks
exit $broken

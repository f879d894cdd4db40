#!/usr/bin/env bash
# Licences of the whole tree against deny.toml; bans and sources too where cargo-deny is installed (or CI_DENY=1).
#
# cargo-deny takes some three minutes to build, as long as all other checks together, and the tree is small. Without it
# only the licences are looked at; sources are looked at by ci/house.sh. Advisories are not looked at by either.
set -euo pipefail
cd "$(dirname "$0")/.."
if [[ ${CI_DENY:-0} == 1 ]] && ! cargo deny --version >/dev/null 2>&1; then
    cargo install --quiet --locked cargo-deny
fi
if cargo deny --version 2>/dev/null; then
    exec cargo deny check bans licenses sources
fi
cargo metadata --quiet --locked --all-features --format-version 1 | python3 -c '
import json, re, sys, tomllib
allowed = tomllib.load(open("deny.toml", "rb"))["licenses"]["allow"]
packages = json.load(sys.stdin)["packages"]
def fits(licence):
    words = re.findall(r"[()]|[^\s()]+", (licence or "none").replace("/", " OR "))
    return eval(" ".join(w.lower() if w in ("AND", "OR") else w if w in "()" else str(w in allowed) for w in words))
bad = [(it["name"], it["license"]) for it in packages if not fits(it["license"])]
for name, licence in bad:
    print(f"{name}: {licence} is not among {allowed}")
print(f"{len(packages)} packages, {len(bad)} with a licence that deny.toml does not allow")
sys.exit(bool(bad))
'
echo 'skipped: bans and sources: cargo-deny is not installed (CI_DENY=1 installs it)'

#!/usr/bin/env bash
# Licences of the whole tree and bans for users against deny.toml; all of it where cargo-deny is installed (or CI_DENY=1).
#
# cargo-deny takes some three minutes to build, as long as all other checks together, and the tree is small. Sources are
# looked at by ci/house.sh too. Advisories are not looked at by any.
set -euo pipefail
cd "$(dirname "$0")/.."
cargo metadata --quiet --locked --all-features --format-version 1 | python3 -c '
import json, re, sys, tomllib
rules, tree = tomllib.load(open("deny.toml", "rb")), json.load(sys.stdin)
packages = {it["id"]: it for it in tree["packages"]}

allowed = rules["licenses"]["allow"]
def fits(licence):
    words = re.findall(r"[()]|[^\s()]+", (licence or "none").replace("/", " OR "))
    return eval(" ".join(w.lower() if w in ("AND", "OR") else w if w in "()" else str(w in allowed) for w in words))
bad = [(it["name"], it["license"]) for it in packages.values() if not fits(it["license"])]
for name, licence in bad:
    print(f"{name}: {licence} is not among {allowed}")
print(f"{len(packages)} packages, {len(bad)} with a licence that deny.toml does not allow")

# What a user gets: all that is reached without a dev-dependency.
needs = {
    node["id"]: [it["pkg"] for it in node["deps"] if any(kind["kind"] != "dev" for kind in it["dep_kinds"])]
    for node in tree["resolve"]["nodes"]
}
reached, ahead = set(), [tree["resolve"]["root"]]
while ahead:
    package = ahead.pop()
    if package not in reached:
        reached.add(package)
        ahead += needs[package]
banned = sorted({packages[it]["name"] for it in reached} & set(rules["bans"]["deny"]))
print(f"{len(reached) - 1} of them reach users, {len(banned)} that deny.toml bans", *banned)
sys.exit(bool(bad or banned))
'
if [[ ${CI_DENY:-0} == 1 ]] && ! cargo deny --version >/dev/null 2>&1; then
    cargo install --quiet --locked cargo-deny
fi
if cargo deny --version 2>/dev/null; then
    exec cargo deny check bans licenses sources
fi
echo 'skipped: sources and wildcards: cargo-deny is not installed (CI_DENY=1 installs it)'

#!/usr/bin/env bash
# AMD's real HIP runtimes, as Debian packages them: our types against their headers, and the doctor without a device.
#
# Packages are unpacked into a temporary folder: nothing is installed, and nobody has to be root. HIP 5.2.3 unless others
# are named: `REAL_HIP='5.2.3 5.7.1 6.4.3 7.2.4' ci/real-hip.sh`. Each takes some 400 MB while it is looked at.
#
# What cannot be had is skipped, and an error with REAL_HIP_REQUIRE=1. With REAL_HIP_STUB=1 the runtimes that have virtual
# memory (6.4.3 and 7.2.4) also run on cards that `real-hip/fake-hsa` pretends beneath them, and the crate's promises with
# them: all of it but AMD's own HIP runtime is pretended then.
set -euo pipefail
cd "$(dirname "$0")/.."

# Debian's suites that have a version (the first one has it, the others what it needs), and the package there.
declare -A suites=([5.2.3]=bookworm [5.7.1]=trixie [6.4.3]=sid [7.2.4]='experimental sid')
declare -A packages=([5.2.3]=libamdhip64-5 [5.7.1]=libamdhip64-5 [6.4.3]=libamdhip64-6 [7.2.4]=libamdhip64-7)
# From wherever this machine has its own packages.
debian=$(apt-get indextargets --format '$(REPO_URI)' 2>/dev/null | grep -m 1 -E '/debian/?$' || true)
keys=/usr/share/keyrings/debian-archive-keyring.gpg
# What the doctor is to say: the version, as the runtime itself gives it, and the library's path are filled in.
no_device='hip:0: none, HIP runtime %s (%s) shows this process no device;'

missing=0
skipped() { echo "skipped: $*"; missing=${REAL_HIP_REQUIRE:-0}; }
for needed in apt-get dpkg-deb cc; do
    command -v $needed >/dev/null || { skipped "$needed is not here"; exit $missing; }
done
[[ -n $debian ]] || { skipped "this machine's packages are not Debian's"; exit $missing; }
[[ -r $keys ]] || { skipped "Debian's keys are not here (package debian-archive-keyring)"; exit $missing; }
[[ $(uname -m) == x86_64 ]] || { skipped "Debian has no HIP for $(uname -m)"; exit $missing; }

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# `fetch VERSION`: unpacks the runtime with all that it needs into $root/tree, and its headers into $root/dev.
fetch() {
    local version=$1 suite found apt newest
    suite=${suites[$version]%% *}
    mkdir -p "$root"/apt/{lists,archives}/partial "$root"/{tree,dev}
    # An apt of its own, which believes that nothing is installed and so leaves nothing out.
    : >"$root/apt/status"
    for name in ${suites[$version]}; do
        echo "deb [arch=amd64 signed-by=$keys] $debian $name main"
    done >"$root/apt/sources.list"
    apt=(-qq -o Dir::Etc::sourcelist="$root/apt/sources.list" -o Dir::Etc::sourceparts=/dev/null
        -o Dir::Etc::preferencesparts=/dev/null -o Dir::State="$root/apt" -o Dir::State::status="$root/apt/status"
        -o Dir::Cache="$root/apt" -o Acquire::Languages=none -o Acquire::Retries=2 -o APT::Sandbox::User=
        -o APT::Update::Error-Mode=any
        # Mirrors may lag behind, and a file that is some weeks old is signed all the same.
        -o Acquire::Check-Valid-Until=false)
    apt-get "${apt[@]}" update >"$root/log" 2>&1 ||
        { skipped "HIP $version: $(grep -m 1 '^E:' "$root/log")"; return 1; }
    found=$(apt-cache "${apt[@]}" madison "${packages[$version]}" | awk '{ print $3; exit }')
    [[ $found == "$version"-* ]] || { skipped "HIP $version: $suite has ${found:-none}"; return 1; }
    apt-get "${apt[@]}" --yes --no-install-recommends --download-only --target-release "$suite" install \
        "${packages[$version]}" libc6 >"$root/log" 2>&1 || { skipped "HIP $version: $(tail -n 1 "$root/log")"; return 1; }
    (cd "$root/dev" && apt-get "${apt[@]}" download {libamdhip64,libhsa-runtime}-dev/"$suite") >"$root/log" 2>&1 ||
        { skipped "HIP $version: $(tail -n 1 "$root/log")"; return 1; }
    # An older C library than the one that the doctor is linked with would not do for it.
    newest=$({ dpkg-deb -f "$root"/apt/archives/libc6_*.deb Version; getconf GNU_LIBC_VERSION; } |
        sed 's/^glibc //' | sort -V | tail -n 1)
    [[ $newest == *-* ]] || rm "$root"/apt/archives/libc6_*.deb
    for package in "$root"/apt/archives/*.deb; do dpkg-deb -x "$package" "$root/tree"; done
    for package in "$root"/dev/*.deb; do dpkg-deb -x "$package" "$root/dev"; done
}

# `with COMMAND...`: with the unpacked runtime's libraries, and with its C library where that is newer than this machine's.
# What lies in $root/first goes before them.
with() {
    local folders=$root/first:$root/tree/usr/lib/x86_64-linux-gnu loader
    loader=$(find "$root/tree" -name ld-linux-x86-64.so.2 -print -quit)
    if [[ -n $loader ]]; then
        timeout 300 "$loader" --library-path "$folders:$(find "$root/tree" -name libc.so.6 -printf %h -quit)" "$@"
    else
        timeout 300 env LD_LIBRARY_PATH="$folders" "$@"
    fi
}

# `look VERSION`: what is to hold of one runtime.
look() {
    local library number said wanted
    HIP_INCLUDE=$root/dev/usr/include cargo test --quiet --test hip_layout -- --ignored --nocapture || return 1

    library=$(find "$root/tree" -name 'libamdhip64.so.[0-9]' -print -quit)
    cc -Wall -D__HIP_PLATFORM_AMD__ -isystem "$root/dev/usr/include" ci/real-hip/probe.c -ldl -o "$root/probe" || return 1
    said=$(with "$root/probe" "$library") || { echo "$said"; return 1; }
    echo "$said"
    if [[ -e /dev/kfd ]]; then
        skipped "HIP $1 without a device: this machine has one"
        return
    fi
    number=$(sed -n 's/^hipRuntimeGetVersion: 0, version //p' <<<"$said")
    # shellcheck disable=SC2059 # the variable is the format
    wanted=$(printf "$no_device" "$((number / 10000000)).$((number / 100000 % 100)).$((number % 100000))" "$library")
    said=$(GROWSPAN_HIP_LIBRARY=$library with target/release/examples/doctor | grep '^hip') || true
    echo "${said:-the doctor says nothing of HIP}"
    [[ $said == "$wanted"* ]] || { echo "broken: expected '$wanted'"; return 1; }
}

# `pretend VERSION`: the same runtime on pretended cards.
pretend() {
    local library said failed=0 promise
    mkdir "$root/first"
    cc -std=gnu17 -Wall -Wextra -O1 -g -fPIC -shared -isystem "$root/dev/usr/include" ci/real-hip/fake-hsa/*.c -lpthread \
        -Wl,-soname,libhsa-runtime64.so.1 -Wl,--version-script=ci/real-hip/fake-hsa/exports.map \
        -o "$root/first/libhsa-runtime64.so.1" || return 1
    library=$(find "$root/tree" -name 'libamdhip64.so.[0-9]' -print -quit)

    said=$(FAKE_HSA_REPORT=1 with "$root/probe" "$library" 2>&1) || failed=1
    echo "$said"
    grep -q '0 spans, 0 mappings, 0 handles$' <<<"$said" || { echo 'broken: the probe left something'; failed=1; }

    # A process each: a promise that the runtime does not survive is one.
    export GROWSPAN_HIP_LIBRARY=$library
    for promise in $("$promises" --ignored --list --format terse | sed 's/: test$//'); do
        if said=$(RUST_BACKTRACE=0 with "$promises" --ignored --exact --nocapture "$promise" 2>&1); then
            echo "$promise: kept"
        else
            # 124: it hung. 134 and 139: it was ended by a fault, of the pretended card or of the runtime's own.
            printf '%s: BROKEN, status %s\n%s\n' "$promise" "$?" "$said"
            failed=1
        fi
    done

    # A map that fails is success to the runtime, which then keeps a reference to the memory. The driver knows of both.
    said=$(FAKE_HSA_FAIL_MAP=1 FAKE_HSA_REPORT=1 RUST_BACKTRACE=0 with "$promises" --ignored --exact --nocapture \
        promises::verdict::every_card_gets_virtual_memory 2>&1) || true
    if grep -q 'setting access: set access failed' <<<"$said" && grep -q '0 spans, 0 mappings, 0 handles$' <<<"$said"; then
        echo 'a map that fails in silence: noticed, and nothing is left'
    else
        printf 'a map that fails in silence: BROKEN\n%s\n' "$said"
        failed=1
    fi
    return $failed
}

cargo build --quiet --release --example doctor
if [[ ${REAL_HIP_STUB:-0} == 1 ]]; then
    promises=$(cargo test --release --features sim --test hip_real --no-run 2>&1 | sed -n 's/.*Executable.*(\(.*\))$/\1/p')
fi
broken=0
for version in ${REAL_HIP:-5.2.3}; do
    echo "-- HIP $version"
    [[ -n ${suites[$version]:-} ]] || { echo "broken: known are ${!suites[*]}"; broken=1; continue; }
    root=$work/$version
    # All are looked at, so that one run shows everything.
    if fetch "$version"; then
        look "$version" || broken=1
        if [[ ${REAL_HIP_STUB:-0} == 1 ]]; then
            case $version in
                5.*) echo "HIP $version has no virtual memory to run on a pretended card" ;;
                *) pretend "$version" || broken=1 ;;
            esac
        fi
    fi
    rm -rf "$root"
done
exit $((broken | missing))

#!/usr/bin/env bash
# Looks for a fast allocator (on a CPU it is worth about a factor of two) and, where there is none, unpacks
# Debian's tcmalloc into .venv/lib/allocator; nothing outside .venv is changed and no root is needed.
# `swift` preloads what it finds there or on the system. Never fails: says in one line what happened.
set -uo pipefail
cd "$(dirname "$0")/.."
target=.venv/lib/allocator
names='libtcmalloc_minimal\.so\.4|libtcmalloc\.so\.4|libjemalloc\.so\.2'

say() {
    echo "allocator: $*"
    exit 0
}
fallback() { say "$*; swift will use glibc's settings (slower)"; }

unpacked() { find "$target" -name 'libtcmalloc_minimal.so.4' 2>/dev/null | head -n 1; }
# A library that cannot be preloaded makes the loader complain on stderr.
loads() { [ -z "$(LD_PRELOAD=$PWD/$1 .venv/bin/python -c '' 2>&1)" ]; }

system=$({ /sbin/ldconfig -p || ldconfig -p; } 2>/dev/null | sed -nE "s/.*\b($names) .*=> (.*)/\2/p" | head -n 1)
[ -n "$system" ] && say "$system"
lib=$(unpacked)
[ -n "$lib" ] && loads "$lib" && say "$lib"
command -v apt-get >/dev/null && command -v dpkg >/dev/null || fallback "no tcmalloc or jemalloc here, and no apt-get to fetch one"

work=$(mktemp -d) || fallback "no temporary folder"
trap 'rm -rf "$work"' EXIT
chmod 755 "$work"
# Package lists of our own, so that empty ones on the machine do not matter. Short timeouts: offline is normal.
apt=(apt-get -qq -o Acquire::Retries=0 -o Acquire::http::Timeout=10 -o Acquire::https::Timeout=10 -o APT::Sandbox::User=)
own=(-o "Dir::State::Lists=$work/lists" -o "Dir::Cache=$work/cache")
fetch() {
    local package
    for package in libtcmalloc-minimal4 libtcmalloc-minimal4t64; do
        (cd "$work" && timeout 60 "${apt[@]}" "$@" download "$package") >/dev/null 2>&1 && return
    done
    return 1
}
fetch || { mkdir -p "$work/lists/partial" "$work/cache/archives/partial" &&
    timeout 120 "${apt[@]}" "${own[@]}" update >/dev/null 2>&1 && fetch "${own[@]}"; } ||
    fallback "no tcmalloc or jemalloc here, and apt-get could not fetch one"

rm -rf "$target" && mkdir -p "$target"
dpkg -x "$work"/libtcmalloc-minimal4*.deb "$target" 2>/dev/null || fallback "Debian's tcmalloc could not be unpacked"
lib=$(unpacked)
[ -n "$lib" ] && loads "$lib" || { rm -rf "$target"; fallback "Debian's tcmalloc cannot be loaded here"; }
say "$lib (fetched with apt-get)"

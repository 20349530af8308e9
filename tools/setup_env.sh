#!/bin/sh
# Build or bring up to date the environment in .venv: setup_env.sh demo|dev
# The stamp .venv/.ready-KIND is written last, so an interrupted installation is done again.
# PYTHON names the interpreter to use, VENV the folder, PIP_ARGS is added to every pip call.
set -eu

kind=$1
venv=${VENV:-.venv}
bin=$venv/bin
usable='import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))'

find_python() {
    for candidate in python3 python3.11 python3.12 python3.13 python3.14 python; do
        if "$candidate" -c "$usable" >/dev/null 2>&1; then
            echo "$candidate"
            return
        fi
    done
}

# The programs in bin/ hold the path of the folder they were installed in: where it was moved or copied they would not start.
was_moved() {
    case $venv in /*) here=$venv ;; *) here=$(pwd -P)/$venv ;; esac
    case $(cat "$bin/pip" 2>/dev/null) in *"$here/bin/"*) return 1 ;; esac
}

refuse_given() {
    found=$("$PYTHON" --version 2>&1) && found="it is $found" || found="it cannot be run"
    echo "PYTHON=$PYTHON cannot be used: $found. comlrl_nb needs Python 3.11 or newer with its venv module." >&2
    exit 1
}

refuse() {
    for candidate in python3 python; do
        found=$("$candidate" --version 2>&1) && echo "  found: $candidate is $found" >&2
    done
    cat >&2 <<'END'
comlrl_nb needs Python 3.11 or newer with its venv module, and no such python was found on PATH.
  Debian, Ubuntu:  apt-get install python3 python3-venv      macOS:  brew install python@3.13
  Or name one:     make PYTHON=/path/to/python3.11 ...
END
    exit 1
}

rm -f "$venv"/.ready-*
if ! "$bin/python" -c "$usable" >/dev/null 2>&1 || ! "$bin/python" -m pip --version >/dev/null 2>&1 || was_moved; then
    python=${PYTHON:-$(find_python)}
    [ -n "$python" ] || refuse
    "$python" -c "$usable" >/dev/null 2>&1 || refuse_given
    echo "Creating $venv with $("$python" --version)"
    "$python" -m venv --clear "$venv"
fi

case $kind in
    demo) what=. ;;
    dev) what='.[dev]' ;;
    *) echo "setup_env.sh: demo or dev, not $kind" >&2; exit 2 ;;
esac
echo "Installing comlrl_nb $what into $venv (the first time takes a minute or more) ..."
# shellcheck disable=SC2086
"$bin/python" -m pip install -qq --disable-pip-version-check ${PIP_ARGS:-} -c constraints.txt -e "$what"
pwd > "$venv/.ready-$kind"

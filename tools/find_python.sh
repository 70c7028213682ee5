#!/usr/bin/env bash
# Prints the path of a Python interpreter that can make the virtual environment, or says what to install.
# A name on PATH is not enough: pyenv's shims exist for versions that are not active, and Debian's Python may lack venv.
set -uo pipefail

works() {
    "$1" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1
}

candidates() {
    local name
    for name in python3.12 python3.13 python3.14 python3 python; do
        command -v "$name"
    done
    ls -d "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.1[2-9]*/bin/python 2>/dev/null
    command -v uv >/dev/null && uv python find '>=3.12' 2>/dev/null
    return 0
}

while read -r candidate; do
    if works "$candidate"; then
        # The interpreter behind a shim, so that the environment does not depend on pyenv's current version.
        "$candidate" -c 'import sys; print(sys.executable)'
        exit 0
    fi
done < <(candidates)

cat >&2 <<'MESSAGE'
No Python 3.12 or newer (with venv) was found on PATH, in pyenv or in uv. Install one of:
  Debian/Ubuntu   sudo apt-get install python3.12 python3.12-venv
  pyenv           pyenv install 3.12
  uv              uv python install 3.12
MESSAGE
exit 1

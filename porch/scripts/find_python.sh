#!/bin/sh
# Prints a Python that Tailrace runs on: python3 if it is one, else the newest of 3.13, 3.12, 3.11.
# Versions given as arguments (find_python.sh 3.13 3.12) are looked for in that order instead.
good() { "$1" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; }
is() { "$1" -c "import sys; sys.exit('%d.%d' % sys.version_info[:2] != '$2')" 2>/dev/null; }

if [ $# -eq 0 ]; then
    good python3 && { command -v python3; exit 0; }
    set -- 3.13 3.12 3.11
fi
for version in "$@"; do
    for found in "$(command -v "python$version")" python3 "$HOME/.pyenv/versions/$version".*/bin/python3; do
        if [ -n "$found" ] && good "$found" && is "$found" "$version"; then
            command -v "$found"
            exit 0
        fi
    done
done
echo "No Python $(echo "$*" | sed 's/ /, /g') on PATH or under ~/.pyenv/versions: install one, or name it with make PYTHON=/path/to/python3." >&2
exit 1

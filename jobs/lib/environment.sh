# shellcheck shell=bash
# How jobs/local.sh and jobs/test.sh make .venv in the project's folder, `root`. They call `locked`
# with a function of theirs that begins with make_env. All runs on macOS too, with bash 3.2.
root=$(unset CDPATH && cd -P "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)

fail() {   # fail MESSAGE: end with code 2, which asks for a correction
  printf '%s: %s\n' "$0" "$*" >&2
  exit 2
}

locked() (   # locked COMMAND...: run it while no other call works on .venv
  # In a subshell, so that the training started later does not hold the lock.
  if command -v flock > /dev/null && ! flock -n 9; then
    echo "another call is working on .venv; waiting for it"
    flock 9
  fi
  "$@"
) 9> "$root/.venv.lock"

make_env() {   # make .venv with what requirements.txt lists, unless it is there
  # .venv/stamp has a line for each thing that is complete. The first one is that of .venv itself,
  # which cannot be moved, and can hold only one MPI: if it differs, .venv is made anew.
  local mpi=${MPI_WHEEL:-no MPI wheel}
  local kind="made in $root with $mpi" python=${PYTHON:-python3}
  if [ -L "$root/.venv" ] || { [ -e "$root/.venv" ] && [ ! -e "$root/.venv/stamp" ]; }; then
    fail "$root/.venv was not made by this script, or not to its end. Remove it, or move it away."
  fi
  if [ "$(head -n 1 "$root/.venv/stamp" 2> /dev/null)" != "$kind" ] ||
    ! "$root/.venv/bin/python" -c '' 2> /dev/null; then
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
      fail "'$python' does not run, or is older than Python 3.10. Name another one:
  PYTHON=python3.11 bash $0"
    echo "making .venv, in minutes: downloads 0.3 GB, or 2.8 GB where torch brings CUDA (Linux)"
    "$python" -m venv --clear "$root/.venv" ||
      fail "'$python -m venv' failed, see above. On Debian and Ubuntu: apt-get install python3-venv"
    echo "$kind" > "$root/.venv/stamp"
  fi
  once "requirements.txt ($(cat "$root"/requirements{,-base}.txt | cksum)), $mpi" \
    install "$root/.venv" -r "$root/requirements.txt" ${MPI_WHEEL:+"$MPI_WHEEL"}
}

once() {   # once WHAT COMMAND...: unless .venv/stamp has the line WHAT, run the command and add it
  if grep -qsxF -- "$1" "$root/.venv/stamp"; then return; fi
  echo "installing ${1%% (*}"
  "${@:2}"
  echo "$1" >> "$root/.venv/stamp"
}

install() {   # install ENVIRONMENT [pip arguments]
  "$1/bin/python" -m pip install --quiet --no-input --disable-pip-version-check "${@:2}" ||
    fail "pip could not install ${*:2}
  Its own message stands above. Without network: set HTTPS_PROXY, or point pip at a mirror
  (PIP_INDEX_URL) or at a folder of wheels (PIP_FIND_LINKS). Then give the same command again."
}

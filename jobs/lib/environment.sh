# shellcheck shell=bash
# How jobs/local.sh and jobs/test.sh make .venv. They source this file, change to the project's
# folder, and call `locked FUNCTION`, a function of theirs that begins with make_env.
# It reads PYTHON and MPI_WHEEL. Both scripts run on macOS too, with bash 3.2.

fail() {   # fail MESSAGE: end with code 2, which asks for a correction
  printf '%s: %s\n' "$0" "$*" >&2
  exit 2
}

locked() {   # locked FUNCTION WORD...: call it while no other call works on .venv
  ( # a subshell, so that the training started later does not hold the lock
    if command -v flock > /dev/null && ! flock -n 9; then
      echo "another call is working on .venv; waiting for it"
      flock 9
    fi
    "$@"
  ) 9> .venv.lock
}

make_env() {   # make .venv with what requirements.txt lists, unless it is there
  # .venv/stamp has a line for each thing that is complete. The first one is that of .venv itself,
  # which cannot be moved, and can hold only one MPI: if it differs, .venv is made anew.
  local python=${PYTHON:-python3} kind="made in $PWD with ${MPI_WHEEL:-no MPI wheel}"
  if [ -L .venv ] || { [ -e .venv ] && [ ! -e .venv/stamp ]; }; then
    fail "$PWD/.venv was not made by this script, or not to its end. Remove it, or move it away."
  fi
  if [ "$(head -n 1 .venv/stamp 2> /dev/null)" != "$kind" ] ||
    ! .venv/bin/python -c '' 2> /dev/null; then
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
      fail "'$python' does not run, or is older than Python 3.10. Name another one:
  PYTHON=python3.11 bash $0"
    echo "making .venv"
    "$python" -m venv --clear .venv ||
      fail "'$python -m venv' failed, see above. On Debian and Ubuntu: apt-get install python3-venv"
    echo "$kind" > .venv/stamp
  fi
  once "requirements.txt ($(cksum < requirements.txt)), ${MPI_WHEEL:-no MPI wheel}" \
    install_requirements
}

install_requirements() {
  echo "  at first this takes minutes, and about 1 GB"
  install .venv/bin/python -r requirements.txt ${MPI_WHEEL:+"$MPI_WHEEL"}
}

once() {   # once WHAT COMMAND...: run the command, unless .venv/stamp has the line WHAT; add it then
  if grep -qsxF -- "$1" .venv/stamp; then return; fi
  echo "installing ${1%% (*}"
  "${@:2}"
  echo "$1" >> .venv/stamp
}

install() {   # install PYTHON [pip arguments]
  "$1" -m pip install --quiet --no-input --disable-pip-version-check "${@:2}" ||
    fail "pip could not install ${*:2}
  Its own message stands above. Without network: set HTTPS_PROXY, or point pip at a mirror
  (PIP_INDEX_URL) or at a folder of wheels (PIP_FIND_LINKS). Then give the same command again."
}

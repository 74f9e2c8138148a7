# shellcheck shell=bash
# How jobs/local.sh and jobs/test.sh make .venv. They source this file, change to the project's
# folder, and call `locked FUNCTION`, a function of theirs that begins with make_env.
# It reads PYTHON and MPI_WHEEL. Both scripts run on macOS too, with bash 3.2.

fail() {   # fail MESSAGE: end with code 2, which asks for a correction
  printf '%s: %s\n' "$0" "$*" >&2
  exit 2
}

locked() {   # locked FUNCTION WORD...: call it while no other call works on .venv
  if [ -L .venv ]; then
    fail "$PWD/.venv is a link, to an environment not made here. Remove the link."
  fi
  if [ -e .venv ] && [ ! -e .venv/stamp ] && [ ! -e .venv.lock ]; then
    fail "$PWD/.venv was not made by this script. Move it away, or use it without this script."
  fi
  ( # a subshell, so that the training started later does not hold the lock
    if command -v flock > /dev/null && ! flock -n 9; then
      echo "another call is working on .venv; waiting for it"
      flock 9 || echo "no file locks on this file system: give such calls one after the other"
    fi
    "$@"
  ) 9> .venv.lock
}

make_env() {   # make .venv, or bring it up to date
  # .venv/stamp is written last. If its first line differs, .venv is made anew: MPI wheels overwrite
  # each other, and an environment cannot be moved. If its second differs, pip runs again.
  local python version kind list
  python=$(choose_python)
  version=$("$python" -c 'import sys
print("%d.%d" % sys.version_info[:2])
sys.exit(sys.version_info < (3, 10))') ||
    fail "cannot run '$python'${version:+, Python $version}. Install Python 3.10 or newer, or
  name one: PYTHON=python3.11 bash $0"
  kind="Python $version, ${MPI_WHEEL:-no MPI wheel}, in $PWD"
  list=$(cksum < requirements.txt)
  if ! env_runs || ! grep -qsxF "$kind" .venv/stamp; then
    echo "making .venv ($kind)"
    "$python" -m venv --clear .venv ||
      fail "'$python -m venv' failed, see above. On Debian and Ubuntu: apt-get install
  python$version-venv. Or name another interpreter: PYTHON=python3.11 bash $0"
  elif [ "$(cat .venv/stamp)" = "$kind"$'\n'"$list" ]; then
    return
  fi
  rm -f .venv/stamp
  echo "installing requirements.txt and ${MPI_WHEEL:-no MPI} into .venv (at first minutes)"
  install .venv/bin/python -r requirements.txt ${MPI_WHEEL:+"$MPI_WHEEL"}
  printf '%s\n' "$kind" "$list" > .venv/stamp
}

choose_python() {   # print the interpreter: PYTHON, or the one that .venv was made from, or python3
  if [ -z "${PYTHON:-}" ] && [ -e .venv/stamp ] && env_runs; then
    .venv/bin/python -c 'import os, sys; print(os.path.realpath(sys.executable))'
  else
    echo "${PYTHON:-python3}"
  fi
}

env_runs() {   # does .venv hold an interpreter that starts?
  .venv/bin/python -c '' 2> /dev/null
}

install() {   # install PYTHON [pip arguments]
  "$1" -m pip install --quiet --no-input --disable-pip-version-check "${@:2}" ||
    fail "pip could not install ${*:2}
  Its own message stands above. Without network: set HTTPS_PROXY, or point pip at a mirror
  (PIP_INDEX_URL) or at a folder of wheels (PIP_FIND_LINKS). Then give the same command again."
}

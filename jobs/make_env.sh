#!/bin/bash
# What jobs/local.sh and jobs/test.sh share: they make .venv, in the repository's folder.
# MPI_WHEEL is the MPI of .venv, in which only one can live. Empty: none.
MPI_WHEEL=${MPI_WHEEL-mpich==5.0.2}

fail() { printf '%s: %s\n' "$0" "$*" >&2; exit 2; }

install() {   # install PYTHON [pip arguments]
  "$1" -m pip install --quiet --no-input --disable-pip-version-check "${@:2}" ||
    fail "pip could not install ${*:2}
  Its own message stands above. Without network: set HTTPS_PROXY, or point pip at a mirror
  (PIP_INDEX_URL) or at a folder of wheels (PIP_FIND_LINKS). Then give the same command again."
}

make_env() {
  # The stamp is written last. Its first line says when to make .venv anew (MPI wheels overwrite
  # each other, and an environment cannot be moved), its second when pip has to run again.
  local python=${PYTHON:-python3} version kind list
  if [ -z "${PYTHON:-}" ] && [ -e .venv/stamp ] && .venv/bin/python -c '' 2> /dev/null; then
    python=.venv/bin/python                # no interpreter was asked for: keep the one .venv has
  fi
  version=$("$python" -c 'import sys; v = sys.version_info; print("%d.%d" % v[:2])
sys.exit(v < (3, 10))') ||
    fail "cannot run '$python'${version:+, Python $version}. Install Python 3.10 or newer, or
  name one: PYTHON=python3.11 bash $0"
  kind="Python $version, ${MPI_WHEEL:-no MPI wheel}, in $PWD"
  list=$(cksum < requirements.txt)
  if ! .venv/bin/python -c '' 2> /dev/null || ! grep -qsxF "$kind" .venv/stamp; then
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

locked() {   # run a function while no other call works on .venv
  [ ! -L .venv ] || fail "$PWD/.venv is a link, to an environment not made here. Remove the link."
  [ ! -e .venv ] || [ -e .venv/stamp ] || [ -e .venv.lock ] ||
    fail "$PWD/.venv was not made by this script. Move it away, or use it without this script."
  ( # a subshell, so that the training started later does not hold the lock
    if command -v flock > /dev/null && ! flock -n 9; then
      echo "another call is working on .venv; waiting for it"
      flock 9 || echo "no file locks on this file system: give such calls one after the other"
    fi
    "$@"
  ) 9> .venv.lock
}

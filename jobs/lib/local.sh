# shellcheck shell=bash
# The inner part of jobs/local.sh: its settings and arguments are checked before anything is
# installed. Its variable called_from is the folder in which the user called it.
# shellcheck disable=SC2154
# shellcheck source=jobs/lib/by_hand.sh
source "$(dirname "${BASH_SOURCE[0]}")/by_hand.sh"    # threads, log

check_settings() {   # sets NPROC too, if it is empty
  if [ -z "$NPROC" ]; then
    local gpus
    gpus=${CUDA_VISIBLE_DEVICES-$(nvidia-smi -L 2> /dev/null | grep -o ^GPU || :)}
    NPROC=$(tr , '\n' <<< "$gpus" | grep -c '^[^-]') || NPROC=2
  fi
  if ! [[ $NPROC =~ ^[1-9][0-9]*$ ]]; then
    fail "NPROC is '$NPROC', expected a number of ranks, 1 or more."
  fi
  if [[ $LAUNCHER != torchrun && $LAUNCHER != mpirun ]]; then
    fail "LAUNCHER is '$LAUNCHER', expected torchrun or mpirun."
  fi
  if [[ ! -f $SCRIPT || ! -f $CONFIG ]]; then
    fail "SCRIPT=$SCRIPT or CONFIG=$CONFIG is not a file in $PWD"
  fi
}

read_words() {   # read_words WORD...: sets `words`: those of ARGS and these, with the paths of data
  # that are there, seen from where the user called us
  local arguments word path previous=''
  read -r -d '' -a arguments <<< "$ARGS" || :    # also if it has several lines
  set -- ${arguments[@]+"${arguments[@]}"} "$@"
  if [[ ${1:-} =~ ^(-[^-h]|[0-9]+$) ]]; then
    fail "'$1' is no option of $SCRIPT. The number of ranks comes first: bash $0 2 --data my.fasta"
  fi
  words=()
  for word in "$@"; do
    case $word,$previous in
      --config* | --nproc_per_node*) fail "$word: give the config as CONFIG=..., ranks first" ;;
      --*data*=* | --*structures=* | data.*=* | --init_from=*) path=${word#*=} ;;
      *,--*data* | *,--*structures | *,--init_from) path=$word ;;
      *) path='' ;;
    esac
    if [ -n "$path" ] && [ -e "$called_from/$path" ]; then
      word=${word%"$path"}$called_from/$path
    fi
    words+=("$word")
    [[ $word != -* ]] || previous=$word     # an option may have several words
  done
}


# shellcheck shell=bash
# shellcheck disable=SC2154    # read here what the scripts set, such as SCRIPT
# What jobs/local.sh and jobs/torchrun_multinode.sh share: threads of a rank, the log. And what is
# checked of the words behind local.sh. It runs on macOS too, with bash 3.2.

share_cores() {   # share_cores RANKS: sets OMP_NUM_THREADS, unless it is set
  # Unset, every rank would use all cores, and the ranks would slow each other down.
  local cores
  cores=$(nproc 2> /dev/null || getconf _NPROCESSORS_ONLN)
  export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > $1 ? cores / $1 : 1))}
}

log_and_show() {   # log_and_show NAME: from here on, what is printed goes to logs/NAME too
  local log=logs/$1
  mkdir -p logs
  # Ctrl-C must not kill tee, which still has to write the last lines to the log.
  exec > >(trap '' INT TERM HUP PIPE; exec tee -a "$log") 2>&1
  echo "output: $PWD/$log"
}

check_words() {   # check_words WORD...: refuse what SCRIPT would refuse, once all is installed
  # Only if it is one of ours, whose options are known.
  local word name takes=none
  if ! grep -q '^from training.command_line import' "$SCRIPT"; then
    return
  fi
  for word in "$@"; do
    case $word in
      -h | --help) takes=none ;;
      --*)
        name=${word#--}
        name=${name%%=*}
        if ! has_option "$name"; then
          fail "$SCRIPT has no option --$name. 'bash $0 1 --help' lists them."
        fi
        case $word in
          *=* | --fresh | --no_cuda) takes=none ;;
          --mutable_*) takes=several ;;
          *) takes=one ;;
        esac ;;
      *=*) if [ "$takes" = one ]; then takes=none; fi ;;
      *)
        if [ "$takes" = none ]; then
          fail "'$word' is neither an option of $SCRIPT nor section.key=value. The number of ranks
  comes first: bash $0 2 --data my.fasta"
        fi
        if [ "$takes" = one ]; then takes=none; fi ;;
    esac
  done
}

has_option() {   # has_option NAME: is there "--NAME" in the code, or "NAME": "..." in its table FLAGS?
  grep -qE "\"--$1\"|\"$1\": \"" "$SCRIPT" training/command_line.py
}

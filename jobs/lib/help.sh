# shellcheck shell=bash
# --help of a job script, which sources this file before it does anything: its first lines.
if [[ ${1:-} = --help || ${1:-} = -h ]]; then
  sed -n '1d; /^# /!q; s/^# //p' "$0"
  exit
fi

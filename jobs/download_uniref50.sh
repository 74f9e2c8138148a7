#!/bin/bash
# Download UniRef50 (13 GB) and check it by the MD5 of UniProt's release.
#   bash jobs/download_uniref50.sh               makes data/uniref50.fasta.gz, when it is whole
#   bash jobs/download_uniref50.sh FOLDER URL    another folder; a mirror: the address of uniref50/
# After an interruption the same command goes on. On a cluster: on a login node, or with https_proxy.
# Then: python prepare_uniref50.py data/uniref50 --fasta data/uniref50.fasta.gz
set -euo pipefail

folder=${1:-data}
url=${2:-https://ftp.uniprot.org/pub/databases/uniprot/uniref/uniref50}
name=uniref50.fasta.gz
pause=${PAUSE:-10}    # seconds after a lost connection
tries=8               # connections that may be lost in one call
# A connection that brings less than 1 KB/s for a minute counts as lost. Not --retry: with it, curl
# throws away what came before.
get=(curl --fail --location --connect-timeout 30 --speed-limit 1000 --speed-time 60)
[ -t 2 ] || get+=(--silent --show-error)

fail() {
  echo "$0: $1" >&2
  exit 1
}

is_whole() {
  echo "$md5  $name.part" | md5sum --check --status
}

mkdir -p "$folder"
cd "$folder"
if [ -e "$name" ]; then
  echo "$folder/$name is there already"
  exit
fi
list=$("${get[@]}" "$url/RELEASE.metalink")
entry=${list#*"name=\"$name\""}        # what follows the name of the file
md5=${entry#*type=\"md5\">}
md5=${md5%%<*}
if [ "$entry" = "$list" ] || ! [[ $md5 =~ ^[0-9a-f]{32}$ ]]; then
  fail "$url/RELEASE.metalink has no MD5 of $name. Expected the address of a folder uniref50"
fi
if ! [ -e "$name.part" ] || ! is_whole; then     # whole: interrupted while it was checked
  until "${get[@]}" --continue-at - --output "$name.part" "$url/$name"; do
    tries=$((tries - 1))
    [ "$tries" -gt 0 ] || fail "gave up; the same command goes on with $name.part"
    sleep "$pause"
  done
  if ! is_whole; then
    rm "$name.part"
    fail "$name has another MD5 than $md5, and is removed. Give the same command again"
  fi
fi
mv "$name.part" "$name"

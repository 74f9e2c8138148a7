#!/bin/bash
# Download UniRef50 (13 GB) and check it by the MD5 of UniProt's release.
#   bash jobs/download_uniref50.sh               makes data/uniref50.fasta.gz, when it is whole
#   bash jobs/download_uniref50.sh FOLDER URL    another folder; a mirror: the address of uniref50/
# After a lost connection the same command goes on. On a cluster: on a login node, or with
# https_proxy. Then: python prepare_uniref50.py data/uniref50 --fasta data/uniref50.fasta.gz
set -euo pipefail

if [[ ${1:-} = --help || ${1:-} = -h ]]; then sed -n '1d; /^# /!q; s/^# //p' "$0"; exit; fi
if [[ ${1:-} = -* ]]; then
  echo "$0: found $1; expected a folder, or nothing. See --help" >&2
  exit 2
fi
url=${2:-https://ftp.uniprot.org/pub/databases/uniprot/uniref/uniref50}
name=uniref50.fasta.gz
# A connection that brings less than 1 KB/s for a minute counts as lost.
get=(curl --fail --location --show-error --speed-limit 1000 --speed-time 60)

mkdir -p "${1:-data}"
cd "${1:-data}"
[ ! -e "$name" ] || { echo "${1:-data}/$name is there already"; exit; }
list=$("${get[@]}" --silent "$url/RELEASE.metalink")
entry=${list#*"name=\"$name\""}      # what follows the name of the file
md5=${entry#*type=\"md5\">}
md5=${md5%%<*}
if [ "$entry" = "$list" ] || ! [[ $md5 =~ ^[0-9a-f]{32}$ ]]; then
  echo "$0: $url/RELEASE.metalink has no MD5 of $name" >&2
  exit 1
fi
if ! echo "$md5  $name.part" | md5sum --check --status 2> /dev/null; then    # not whole yet
  "${get[@]}" --continue-at - --output "$name.part" "$url/$name"
  if ! echo "$md5  $name.part" | md5sum --check --status; then
    rm "$name.part"
    echo "$0: $name has another MD5 than $md5, and is removed. Give the command again." >&2
    exit 1
  fi
fi
mv "$name.part" "$name"

#!/bin/bash
# The steps of enroot import, with the same programs: download each layer and store it as zstd,
# unpack all layers, convert whiteouts for overlayfs, squash the overlay with lzo.
# Arguments: URL of the registry, repository, tag, working directory, directory of helpers.
# shellcheck disable=SC2016 # other shells expand the text in single quotes
set -euo pipefail

registry=$1 repository=$2 tag=$3 helpers=$5
cd "$4"
cpus=$(nproc)
mapfile -t digests < <(curl -fsS -H 'Accept: application/vnd.docker.distribution.manifest.v2+json' \
    "$registry/v2/$repository/manifests/$tag" |
    python3 -IS -c 'import json, sys; print(*(x["digest"] for x in json.load(sys.stdin)["layers"]), sep="\n")')

fetch() {
    curl -fsS "$registry/v2/$repository/blobs/$1" | "$(type -P pigz || type -P gzip)" -d -f -c |
        zstd -q -1 -T"$cpus" -o "${1#sha256:}"
}
unpack() {
    mkdir "$1"
    tar -C "$1" --anchored --exclude='dev/*' --exclude='./dev/*' -pxf "${2#sha256:}"
    chmod -R u+rwX "$1"
}
export -f fetch unpack
export registry repository cpus

printf '%s\n' "${digests[@]}" | xargs -P 10 -I {} bash -c 'set -euo pipefail; fetch {}'
number=0
for digest in "${digests[@]}"; do
    number=$((number + 1))
    echo "$number $digest"
done | xargs -P "$cpus" -L 1 bash -c 'set -euo pipefail; unpack "$0" "$1"'

squash() {
    lower=
    "$helpers/penroot-aufs2ovlfs" . # once for all layers, because our program starts an interpreter
    for ((number = 1; number <= $1; number++)); do
        lower=$number${lower:+:$lower}
    done
    "$helpers/penroot-mksquashovlfs" "$lower" image.sqsh -all-root -no-progress -quiet -processors "$cpus" \
        -comp lzo -noD -exit-on-error
}
export -f squash
export helpers
unshare --user --map-root-user --mount bash -c 'set -euo pipefail; squash "$0"' "${#digests[@]}"

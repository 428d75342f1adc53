#!/bin/bash
# mpirun of the host, ranks in containers: without Slurm, or as the MPI Operator does.
#
#   mpirun.sh 4 docker://ubuntu:24.04 ./program
#
# The container is made once, so that no rank imports; every rank then starts
# it in -wdir, the directory of the program on the host. Open MPI's variables
# go in by name: the programs of one node find each other by them.
set -e

ranks=${1:?usage: mpirun.sh RANKS IMAGE COMMAND...} image=${2:?} && shift 2

name=mpirun-$$
penroot create --name "$name" "$image"
trap 'penroot remove --force "$name"' EXIT

# shellcheck disable=SC2016 # the rank's own shell expands it
mpirun -np "$ranks" -wdir "$PWD" bash -c '
    name=$1 && shift
    options=()
    for variable in $(compgen -e | grep -E "^(OMPI|PMIX|OPAL|PRTE|ORTE)_"); do
        options+=(--env "$variable")
    done
    for directory in "$PWD" "${PMIX_SERVER_TMPDIR:-}" "${TMPDIR:-/tmp}"; do
        test -z "$directory" || options+=(--mount "$directory:$directory")
    done
    exec penroot start "${options[@]}" "$name" sh -c "cd \"$PWD\" && exec \"\$@\"" sh "$@"
' bash "$name" "$@"

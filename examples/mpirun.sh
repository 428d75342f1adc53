#!/bin/bash
# mpirun of the host, ranks in containers: without Slurm, or as the MPI Operator does.
#
#   mpirun.sh 4 docker://ubuntu:24.04 ./program
#
# The ranks of a node share one container, which the first of them makes. A program
# of the image needs no more than: mpirun -np 4 penroot start IMAGE PROGRAM. This
# one is the host's, in the directory where mpirun starts it.
set -e

ranks=${1:?usage: mpirun.sh RANKS IMAGE COMMAND...} image=${2:?} && shift 2

# shellcheck disable=SC2016 # the container's shell expands it
mpirun -np "$ranks" penroot start --mount "$PWD:$PWD" "$image" sh -c 'cd "$0" && exec "$@"' "$PWD" "$@"

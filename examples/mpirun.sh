#!/bin/bash
# Start ranks in containers with the host's mpirun, without Slurm. The MPI Operator of Kubernetes
# runs mpirun in the same way.
#
#   mpirun.sh 4 docker://ubuntu:24.04 ./program
#
# The ranks of a node share one container; the first rank creates it. This script mounts
# the current directory and runs the program in it. If you do not need the directory, use:
# mpirun -np 4 penroot start IMAGE PROGRAM
set -e

ranks=${1:?usage: mpirun.sh RANKS IMAGE COMMAND...} image=${2:?} && shift 2

# shellcheck disable=SC2016 # the container's shell expands it
mpirun -np "$ranks" penroot start --mount "$PWD:$PWD" "$image" sh -c 'cd "$0" && exec "$@"' "$PWD" "$@"

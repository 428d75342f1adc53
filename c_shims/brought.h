/* The directory of a container that holds the Slurm of its node: enroot_py/features/slurm_inside. */
#ifndef PENROOT_BROUGHT_H
#define PENROOT_BROUGHT_H

#define SLURM_HERE "/run/penroot/slurm"

/* Before the names of variables that the launcher keeps from the loader, or from Slurm, for what runs after it: the
 * plugin gives them their names back. */
#define SLURM_KEPT "PENROOT_KEPT_"

#endif

/* The Slurm of the node in a container: enroot_py/features/slurm_inside. */
#ifndef PENROOT_BROUGHT_H
#define PENROOT_BROUGHT_H

#define SLURM_HERE "/run/penroot/slurm"

/* The launcher hides variables from the loader and from Slurm by this prefix. The plugin restores their names for the job. */
#define SLURM_KEPT "PENROOT_KEPT_"

#endif

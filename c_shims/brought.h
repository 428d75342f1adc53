/* Names that penroot-slurm and the plugin share. SLURM_HERE is the directory of a container into which --container-slurm puts the
 * node's Slurm (enroot_py/features/slurm_inside). */
#ifndef PENROOT_BROUGHT_H
#define PENROOT_BROUGHT_H

#define SLURM_HERE "/run/penroot/slurm"

/* penroot-slurm hides variables from the loader and from Slurm: it puts this prefix before their names. The plugin restores the
 * names for the job. */
#define SLURM_KEPT "PENROOT_KEPT_"

#endif

/* Reads squashfs 4.0: the kernel's Documentation/filesystems/squashfs and fs/squashfs/squashfs_fs.h. */
#ifndef PENROOT_SQUASHFS_H
#define PENROOT_SQUASHFS_H

#include <stdbool.h>
#include <stdint.h>

/* What it was built to decompress, the best of them last. */
#ifdef HAVE_LZ4
#define SQUASHFS_WITH_LZ4 " lz4"
#else
#define SQUASHFS_WITH_LZ4 ""
#endif
#ifdef HAVE_ZSTD
#define SQUASHFS_WITH_ZSTD " zstd"
#else
#define SQUASHFS_WITH_ZSTD ""
#endif
#define SQUASHFS_COMPRESSIONS "gzip" SQUASHFS_WITH_LZ4 SQUASHFS_WITH_ZSTD

struct squashfs;

/* The image at an offset of a file. Ends the program with one line where it is none, or one that we cannot read. */
struct squashfs *squashfs_open(const char *path, long long offset);
void squashfs_close(struct squashfs *fs);

/* Bytes that the files take when unpacked, blocks of 4 KiB counted in full. */
uint64_t squashfs_size(struct squashfs *fs);

/* Unpacks beneath an open directory, as the caller: directories get u+rwx, set-id bits and devices are left
 * out. One process for each CPU; progress as "Extracting 42%" on stderr where it is asked for. */
void squashfs_unpack(struct squashfs *fs, int directory, bool progress);

#endif

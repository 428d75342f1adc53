#include "squashfs.h"

#include "common.h"

#include <err.h>
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <sys/xattr.h>
#include <unistd.h>
#ifdef HAVE_LZ4
#include <lz4.h>
#endif
#include <zlib.h>
#ifdef HAVE_ZSTD
#include <zstd.h>
#endif

enum { GZIP = 1, LZ4 = 5, ZSTD = 6 };
enum { DIRECTORY = 1, FILE_ = 2, SYMLINK = 3, BLOCK = 4, CHARACTER = 5, FIFO = 6, SOCKET = 7, EXTENDED = 7 };
enum { METADATA = 8192, BATCH = 64, MAX_WORKERS = 16, MAX_DEPTH = 1024, SUPERBLOCK = 96 };

#define NONE 0xffffffffU
#define RAW_BLOCK 0x1000000U
#define RAW_METADATA 0x8000U

/* A table of metadata blocks, unpacked: each holds 8 KiB, but for the last. */
struct table {
	uint8_t *data;
	size_t length, blocks;
	uint64_t start, *starts; /* of each block on disk */
};

struct squashfs {
	const uint8_t *data;
	size_t length;
	uint32_t inodes, block_size, fragments;
	uint16_t compression;
	uint64_t root, fragment_table;
	struct table inode_table, directory_table, xattr_table, xattr_ids;
	uint32_t cached; /* which fragment is in fragment_data */
	uint8_t *fragment_data, *block;
	size_t fragment_length;
	char **links; /* by inode number: where a file with several names is */
#ifdef HAVE_ZSTD
	ZSTD_DCtx *zstd;
#endif
};

struct inode {
	uint16_t type, mode;
	uint32_t mtime, number, links;
	/* of a directory: where its listing is; of a file: its blocks; of a symlink: its text */
	uint32_t block, offset, fragment, xattr;
	uint64_t size, start;
	const uint8_t *rest; /* block sizes, or the text */
	size_t rest_length;
};

static void __attribute__((noreturn)) damaged(const char *what)
{
	errx(EXIT_FAILURE, "the image is damaged: %s", what);
}

static uint16_t u16(const uint8_t *p)
{
	return (uint16_t)(p[0] | p[1] << 8);
}

static uint32_t u32(const uint8_t *p)
{
	return (uint32_t)u16(p) | (uint32_t)u16(p + 2) << 16;
}

static uint64_t u64(const uint8_t *p)
{
	return u32(p) | (uint64_t)u32(p + 4) << 32;
}

static const uint8_t *at(struct squashfs *fs, uint64_t offset, uint64_t length)
{
	if (offset > fs->length || length > fs->length - offset)
		damaged("it points beyond its end");
	return fs->data + offset;
}

static void *allocate(size_t length)
{
	void *p = calloc(1, length ? length : 1);

	if (!p)
		err(EXIT_FAILURE, "cannot allocate memory");
	return p;
}

static int knows(uint16_t compression)
{
	switch (compression) {
	case GZIP:
#ifdef HAVE_LZ4
	case LZ4:
#endif
#ifdef HAVE_ZSTD
	case ZSTD:
#endif
		return 1;
	}
	return 0;
}

static size_t decompress(struct squashfs *fs, const uint8_t *from, size_t length, uint8_t *to, size_t room)
{
	if (fs->compression == GZIP) {
		uLongf n = room;

		if (uncompress(to, &n, from, length) == Z_OK)
			return n;
	}
#ifdef HAVE_LZ4
	if (fs->compression == LZ4) {
		int n = LZ4_decompress_safe((const char *)from, (char *)to, (int)length, (int)room);

		if (n >= 0)
			return (size_t)n;
	}
#endif
#ifdef HAVE_ZSTD
	if (fs->compression == ZSTD) {
		size_t n = ZSTD_decompressDCtx(fs->zstd, to, room, from, length);

		if (!ZSTD_isError(n))
			return n;
	}
#endif
	damaged("a block does not decompress");
}

/* One metadata block at *offset, which moves behind it. */
static size_t read_metadata(struct squashfs *fs, uint64_t *offset, uint8_t *to)
{
	uint16_t header = u16(at(fs, *offset, 2));
	size_t length = header & (RAW_METADATA - 1);
	const uint8_t *from = at(fs, *offset + 2, length);

	*offset += 2 + length;
	if (!(header & RAW_METADATA))
		return decompress(fs, from, length, to, METADATA);
	if (length > METADATA)
		damaged("a metadata block is too long");
	memcpy(to, from, length);
	return length;
}

static void read_table(struct squashfs *fs, struct table *table, uint64_t start, uint64_t end)
{
	size_t room = 0;

	table->start = start;
	if (end < start)
		damaged("its tables overlap");
	for (uint64_t offset = start; offset < end;) {
		if (table->blocks == room) {
			room = room ? room * 2 : 16;
			table->data = realloc(table->data, room * METADATA);
			table->starts = realloc(table->starts, room * sizeof(uint64_t));
			if (!table->data || !table->starts)
				err(EXIT_FAILURE, "cannot allocate memory");
		}
		/* A short block in the middle leaves zeros: its offsets stay those of 8 KiB blocks. */
		memset(table->data + table->blocks * METADATA, 0, METADATA);
		table->starts[table->blocks] = offset - start;
		table->length = table->blocks * METADATA + read_metadata(fs, &offset, table->data + table->blocks * METADATA);
		table->blocks++;
	}
}

/* What is in a table at a block's start on disk and an offset in it; *left is what follows. */
static const uint8_t *lookup(const struct table *table, uint64_t block, uint32_t offset, size_t *left)
{
	size_t low = 0, high = table->blocks, position;

	while (low < high) {
		size_t middle = (low + high) / 2;

		if (table->starts[middle] < block)
			low = middle + 1;
		else
			high = middle;
	}
	if (low == table->blocks || table->starts[low] != block || offset >= METADATA)
		damaged("it points to no metadata block");
	position = low * METADATA + offset;
	if (position > table->length)
		damaged("it points beyond a table");
	*left = table->length - position;
	return table->data + position;
}

static const uint8_t *take(const uint8_t **p, size_t *left, size_t n)
{
	const uint8_t *here = *p;

	if (n > *left)
		damaged("a record is cut off");
	*p += n;
	*left -= n;
	return here;
}

static struct inode read_inode(struct squashfs *fs, uint64_t reference)
{
	size_t left;
	const uint8_t *p = lookup(&fs->inode_table, reference >> 16, (uint32_t)(reference & 0xffff), &left);
	const uint8_t *f = take(&p, &left, 16);
	struct inode inode = {.type = u16(f), .mode = u16(f + 2), .mtime = u32(f + 8), .number = u32(f + 12), .links = 1,
			      .xattr = NONE};

	switch (inode.type) {
	case DIRECTORY:
		f = take(&p, &left, 16);
		inode.block = u32(f);
		inode.size = u16(f + 8);
		inode.offset = u16(f + 10);
		break;
	case DIRECTORY + EXTENDED:
		f = take(&p, &left, 24);
		inode.size = u32(f + 4);
		inode.block = u32(f + 8);
		inode.offset = u16(f + 18);
		inode.xattr = u32(f + 20);
		break;
	case FILE_:
		f = take(&p, &left, 16);
		inode.start = u32(f);
		inode.fragment = u32(f + 4);
		inode.offset = u32(f + 8);
		inode.size = u32(f + 12);
		break;
	case FILE_ + EXTENDED:
		f = take(&p, &left, 40);
		inode.start = u64(f);
		inode.size = u64(f + 8);
		inode.links = u32(f + 24);
		inode.fragment = u32(f + 28);
		inode.offset = u32(f + 32);
		inode.xattr = u32(f + 36);
		break;
	case SYMLINK:
	case SYMLINK + EXTENDED:
		f = take(&p, &left, 8);
		inode.links = u32(f);
		inode.size = u32(f + 4);
		inode.rest = take(&p, &left, inode.size);
		break;
	case BLOCK:
	case CHARACTER:
	case BLOCK + EXTENDED:
	case CHARACTER + EXTENDED:
	case FIFO:
	case SOCKET:
	case FIFO + EXTENDED:
	case SOCKET + EXTENDED:
		inode.links = u32(take(&p, &left, 4));
		break;
	default:
		damaged("an inode of an unknown type");
	}
	if (inode.type > EXTENDED)
		inode.type = (uint16_t)(inode.type - EXTENDED);
	if (inode.type == FILE_) {
		uint64_t blocks = inode.size / fs->block_size;

		if (inode.fragment == NONE && inode.size % fs->block_size)
			blocks++;
		if (blocks > left / 4)
			damaged("a file has more blocks than it can");
		inode.rest_length = blocks;
		inode.rest = take(&p, &left, blocks * 4);
	}
	if (inode.number == 0 || inode.number > fs->inodes)
		damaged("an inode has an impossible number");
	return inode;
}

typedef void visit(struct squashfs *fs, int parent, const char *name, const char *path, const struct inode *inode,
		   void *context);

struct walk {
	visit *before, *after; /* after: of a directory, when what it holds has been visited */
	void *context;
	bool open; /* parent is the directory where it is unpacked, else -1 */
	int depth;
};

static void walk(struct squashfs *fs, const struct inode *directory, int fd, const char *path, struct walk *w)
{
	size_t left;
	const uint8_t *p;
	uint64_t size = directory->size;

	if (size <= 3) /* an empty one; the 3 stand for "." and ".." */
		return;
	if (++w->depth > MAX_DEPTH)
		damaged("its directories nest too deeply");
	p = lookup(&fs->directory_table, directory->block, directory->offset, &left);
	if (left > size - 3)
		left = size - 3;
	while (left) {
		const uint8_t *header = take(&p, &left, 12);
		uint32_t count = u32(header) + 1, block = u32(header + 4);

		for (; count; count--) {
			const uint8_t *entry = take(&p, &left, 8);
			size_t length = (size_t)u16(entry + 6) + 1;
			const uint8_t *bytes = take(&p, &left, length);
			char name[257];
			struct inode inode = read_inode(fs, (uint64_t)block << 16 | u16(entry));
			AUTO_FREE inner = NULL;

			if (length > 256 || memchr(bytes, '/', length) || memchr(bytes, 0, length))
				damaged("a file has an impossible name");
			memcpy(name, bytes, length);
			name[length] = '\0';
			if (!strcmp(name, ".") || !strcmp(name, ".."))
				damaged("a file has an impossible name");
			inner = text("%s%s%s", path, *path ? "/" : "", name);
			if (w->before)
				w->before(fs, fd, name, inner, &inode, w->context);
			if (inode.type != DIRECTORY)
				continue;
			{
				AUTO_CLOSE next = w->open ? openat(fd, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC) : -1;

				if (w->open && next < 0)
					err(EXIT_FAILURE, "cannot open %s", inner);
				walk(fs, &inode, next, inner, w);
			}
			if (w->after)
				w->after(fs, fd, name, inner, &inode, w->context);
		}
	}
	w->depth--;
}

static void walk_all(struct squashfs *fs, int directory, struct walk *w)
{
	struct inode root = read_inode(fs, fs->root);

	if (root.type != DIRECTORY)
		damaged("its root is no directory");
	w->open = directory >= 0;
	walk(fs, &root, directory, "", w);
}

/* Extended attributes: their metadata blocks, those of the index by number, then where the first ones begin. */
static void read_xattrs(struct squashfs *fs, uint64_t start)
{
	const uint8_t *header = at(fs, start, 16);
	uint32_t count = u32(header + 8);

	if (!count)
		return;
	read_table(fs, &fs->xattr_table, u64(header), u64(at(fs, start + 16, 8)));
	read_table(fs, &fs->xattr_ids, u64(at(fs, start + 16, 8)), start);
	if (fs->xattr_ids.length / 16 < count)
		damaged("it has fewer extended attributes than it says");
}

/* Those of users: others would mean something to the host. */
static void set_xattrs(struct squashfs *fs, const struct inode *inode, int fd, const char *path)
{
	enum { USER = 0, KIND = 0xff, ELSEWHERE = 0x100 };
	const uint8_t *id, *p;
	uint64_t reference;
	size_t left;

	if (inode->xattr == NONE)
		return;
	if (inode->xattr >= fs->xattr_ids.length / 16)
		damaged("a file has extended attributes that are not there");
	id = fs->xattr_ids.data + (size_t)inode->xattr * 16;
	reference = u64(id);
	p = lookup(&fs->xattr_table, reference >> 16, (uint32_t)(reference & 0xffff), &left);
	for (uint32_t count = u32(id + 8); count; count--) {
		const uint8_t *entry = take(&p, &left, 4), *bytes = take(&p, &left, u16(entry + 2));
		uint32_t length = u32(take(&p, &left, 4));
		const uint8_t *value = take(&p, &left, length);
		AUTO_FREE name = text("user.%.*s", (int)u16(entry + 2), (const char *)bytes);

		if (u16(entry) & ELSEWHERE) {
			size_t rest;
			const uint8_t *q;

			if (length != 8)
				damaged("an extended attribute is nowhere");
			q = lookup(&fs->xattr_table, u64(value) >> 16, (uint32_t)(u64(value) & 0xffff), &rest);
			length = u32(take(&q, &rest, 4));
			value = take(&q, &rest, length);
		}
		/* Some file systems have none. */
		if ((u16(entry) & KIND) == USER && fsetxattr(fd, name, value, length, 0) < 0 && errno != ENOTSUP)
			err(EXIT_FAILURE, "cannot set the attribute %s of %s", name, path);
	}
}

struct squashfs *squashfs_open(const uint8_t *data, size_t length)
{
	struct squashfs *fs = allocate(sizeof(*fs));
	uint64_t end, table;

	fs->data = data;
	fs->length = length;
	fs->cached = NONE;
	if (length < SUPERBLOCK || memcmp(data, "hsqs", 4) || u16(data + 28) != 4)
		errx(EXIT_FAILURE, "not a squashfs 4 image");
	fs->inodes = u32(data + 4);
	fs->block_size = u32(data + 12);
	fs->fragments = u32(data + 16);
	fs->compression = u16(data + 20);
	fs->root = u64(data + 32);
	fs->fragment_table = u64(data + 80);
	if (u64(data + 40) > length)
		errx(EXIT_FAILURE, "the image is truncated: %zu of %llu bytes", length, (unsigned long long)u64(data + 40));
	if (fs->block_size < 4096 || fs->block_size > 1 << 20)
		damaged("its block size is impossible");
#ifdef HAVE_ZSTD
	if (fs->compression == ZSTD && !(fs->zstd = ZSTD_createDCtx()))
		err(EXIT_FAILURE, "cannot allocate memory");
#endif
	if (!knows(fs->compression))
		errx(EXIT_FAILURE, "the image is compressed in way %d; known here: " SQUASHFS_COMPRESSIONS, fs->compression);
	read_table(fs, &fs->inode_table, u64(data + 64), u64(data + 72));
	/* Directories end where the first of the tables behind them begins. */
	end = u64(at(fs, u64(data + 48), 8));
	if (u64(data + 88) != UINT64_MAX && (table = u64(at(fs, u64(data + 88), 8))) < end)
		end = table;
	if (fs->fragments && (table = u64(at(fs, fs->fragment_table, 8))) < end)
		end = table;
	read_table(fs, &fs->directory_table, u64(data + 72), end);
	if (u64(data + 56) != UINT64_MAX)
		read_xattrs(fs, u64(data + 56));
	if (fs->inodes > fs->inode_table.length / 16)
		damaged("it has fewer inodes than it says");
	fs->links = allocate(((size_t)fs->inodes + 1) * sizeof(char *));
	fs->block = allocate(fs->block_size);
	fs->fragment_data = allocate(fs->block_size);
	return fs;
}

void squashfs_close(struct squashfs *fs)
{
	for (size_t i = 0; i <= fs->inodes; i++)
		free(fs->links[i]);
	free(fs->links);
	free(fs->inode_table.data);
	free(fs->inode_table.starts);
	free(fs->directory_table.data);
	free(fs->directory_table.starts);
	free(fs->xattr_table.data);
	free(fs->xattr_table.starts);
	free(fs->xattr_ids.data);
	free(fs->xattr_ids.starts);
	free(fs->fragment_data);
	free(fs->block);
#ifdef HAVE_ZSTD
	ZSTD_freeDCtx(fs->zstd);
#endif
	free(fs);
}

/* A data block; returns where its bytes are and how many. */
static const uint8_t *read_block(struct squashfs *fs, uint64_t start, uint32_t size, uint8_t *to, size_t *length)
{
	uint32_t stored = size & (RAW_BLOCK - 1);
	const uint8_t *from = at(fs, start, stored);

	if (size & RAW_BLOCK) {
		*length = stored;
		return from;
	}
	*length = decompress(fs, from, stored, to, fs->block_size);
	return to;
}

static const uint8_t *read_fragment(struct squashfs *fs, uint32_t fragment, size_t *length)
{
	if (fs->cached != fragment) {
		uint8_t entries[METADATA];
		const uint8_t *entry = entries + (size_t)(fragment % 512) * 16, *data;
		uint64_t offset;
		size_t n;

		if (fragment >= fs->fragments)
			damaged("a file's end is in no fragment");
		offset = u64(at(fs, fs->fragment_table + (uint64_t)(fragment / 512) * 8, 8));
		if (read_metadata(fs, &offset, entries) < (size_t)(fragment % 512 + 1) * 16)
			damaged("its fragment table is cut off");
		data = read_block(fs, u64(entry), u32(entry + 8), fs->fragment_data, &n);
		if (n > fs->block_size)
			damaged("a fragment is too long");
		if (data != fs->fragment_data)
			memcpy(fs->fragment_data, data, n);
		fs->fragment_length = n;
		fs->cached = fragment;
	}
	*length = fs->fragment_length;
	return fs->fragment_data;
}

static void put(int fd, const uint8_t *data, size_t length, const char *path)
{
	if (!write_all(fd, data, length))
		err(EXIT_FAILURE, "cannot write %s", path);
}

static void write_file(struct squashfs *fs, int fd, const char *path, const struct inode *inode)
{
	uint64_t start = inode->start, left = inode->size;

	for (size_t i = 0; i < inode->rest_length; i++) {
		uint32_t size = u32(inode->rest + i * 4);
		size_t want = left < fs->block_size ? (size_t)left : fs->block_size, length = want;

		if (size == 0) { /* a hole */
			if (lseek(fd, (off_t)want, SEEK_CUR) < 0)
				err(EXIT_FAILURE, "cannot write %s", path);
		} else {
			const uint8_t *data = read_block(fs, start, size, fs->block, &length);

			if (length != want)
				damaged("a file's block has the wrong length");
			put(fd, data, length, path);
			start += size & (RAW_BLOCK - 1);
		}
		left -= want;
	}
	if (left) {
		size_t length;
		const uint8_t *data = read_fragment(fs, inode->fragment, &length);

		if (inode->offset > length || left > length - inode->offset)
			damaged("a file's end is beyond its fragment");
		put(fd, data + inode->offset, (size_t)left, path);
	}
	if (ftruncate(fd, (off_t)inode->size) < 0)
		err(EXIT_FAILURE, "cannot write %s", path);
}

struct sum {
	uint64_t bytes;
	uint8_t *seen; /* by inode number */
};

static void add_size(struct squashfs *fs, int parent, const char *name, const char *path, const struct inode *inode,
		     void *context)
{
	struct sum *sum = context;

	(void)fs, (void)parent, (void)name, (void)path;
	if (inode->type != DIRECTORY && sum->seen[inode->number]++)
		return;
	sum->bytes += inode->type == FILE_ ? (inode->size + 4095) / 4096 * 4096 : 4096;
}

uint64_t squashfs_size(struct squashfs *fs)
{
	struct sum sum = {0, allocate((size_t)fs->inodes + 1)};

	walk_all(fs, -1, &(struct walk){.before = add_size, .context = &sum});
	free(sum.seen);
	return sum.bytes;
}

static void set_time(int parent, const char *name, const struct inode *inode)
{
	struct timespec times[2] = {{.tv_sec = inode->mtime}, {.tv_sec = inode->mtime}};

	utimensat(parent, name, times, AT_SYMLINK_NOFOLLOW);
}

/* First pass: everything but the content of files, which comes in parallel, and further names of files. */
static void make(struct squashfs *fs, int parent, const char *name, const char *path, const struct inode *inode,
		 void *context)
{
	AUTO_CLOSE fd = -1;
	int status = 0;

	(void)context;
	if (inode->type != DIRECTORY && fs->links[inode->number]) {
		if (linkat(*(int *)context, fs->links[inode->number], parent, name, 0) < 0)
			err(EXIT_FAILURE, "cannot link %s", path);
		return;
	}
	switch (inode->type) {
	case DIRECTORY:
		status = mkdirat(parent, name, (inode->mode & 0777) | 0700);
		break;
	case FILE_:
		fd = openat(parent, name, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
		status = fd;
		break;
	case SYMLINK: {
		AUTO_FREE target = strndup((const char *)inode->rest, inode->size);

		status = target ? symlinkat(target, parent, name) : -1;
		set_time(parent, name, inode);
		break;
	}
	case FIFO:
		status = mkfifoat(parent, name, inode->mode & 0777);
		break;
	default: /* devices come from the host, sockets from their servers */
		return;
	}
	if (status < 0)
		err(EXIT_FAILURE, "cannot create %s", path);
	if (inode->type != DIRECTORY && inode->links > 1 && !(fs->links[inode->number] = strdup(path)))
		err(EXIT_FAILURE, "cannot allocate memory");
}

struct work {
	volatile uint64_t ticket, bytes; /* shared by the workers */
	uint64_t total;
};

struct share {
	struct work *work;
	uint64_t index, mine;
	uint8_t *seen;
	bool progress;
	unsigned int shown;
};

/* Second pass, in each worker: files in batches, each to the worker that takes its ticket. */
static void fill(struct squashfs *fs, int parent, const char *name, const char *path, const struct inode *inode,
		 void *context)
{
	struct share *share = context;
	uint64_t batch;
	AUTO_CLOSE fd = -1;

	if (inode->type != FILE_ || share->seen[inode->number]++)
		return;
	batch = share->index++ / BATCH;
	if (batch > share->mine)
		share->mine = __sync_fetch_and_add(&share->work->ticket, 1);
	if (batch != share->mine)
		return;
	fd = openat(parent, name, O_WRONLY | O_NOFOLLOW | O_CLOEXEC);
	if (fd < 0)
		err(EXIT_FAILURE, "cannot open %s", path);
	write_file(fs, fd, path, inode);
	set_xattrs(fs, inode, fd, path);
	if (fchmod(fd, inode->mode & 01777) < 0)
		err(EXIT_FAILURE, "cannot change the mode of %s", path);
	futimens(fd, (struct timespec[2]){{.tv_sec = inode->mtime}, {.tv_sec = inode->mtime}});
	__sync_fetch_and_add(&share->work->bytes, (inode->size + 4095) / 4096 * 4096);
	if (share->progress && share->work->total) {
		unsigned int percent = (unsigned int)(share->work->bytes * 100 / share->work->total);

		if (percent != share->shown)
			fprintf(stderr, "\rExtracting %u%%", share->shown = percent);
	}
}

/* Last: a directory's mode and time, which its content has changed. */
static void finish(struct squashfs *fs, int parent, const char *name, const char *path, const struct inode *inode,
		   void *context)
{
	(void)context;
	if (inode->xattr != NONE) {
		AUTO_CLOSE fd = openat(parent, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);

		if (fd < 0)
			err(EXIT_FAILURE, "cannot open %s", path);
		set_xattrs(fs, inode, fd, path);
	}
	fchmodat(parent, name, (inode->mode & 01777) | 0700, 0);
	set_time(parent, name, inode);
}

static void work(struct squashfs *fs, int directory, struct work *shared, bool progress)
{
	struct share share = {.work = shared, .seen = allocate((size_t)fs->inodes + 1), .progress = progress};

	share.mine = __sync_fetch_and_add(&shared->ticket, 1);
	walk_all(fs, directory, &(struct walk){.before = fill, .context = &share});
	free(share.seen);
}

void squashfs_unpack(struct squashfs *fs, int directory, bool progress)
{
	struct work *shared = mmap(NULL, sizeof(*shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	struct inode root = read_inode(fs, fs->root);
	pid_t workers[MAX_WORKERS];
	int count = 0, cpus;
	bool failed = false;
	cpu_set_t affinity;

	if (shared == MAP_FAILED)
		err(EXIT_FAILURE, "cannot allocate memory");
	shared->total = squashfs_size(fs);
	umask(0);
	walk_all(fs, directory, &(struct walk){.before = make, .context = &directory});
	cpus = sched_getaffinity(0, sizeof(affinity), &affinity) < 0 ? 1 : CPU_COUNT(&affinity);
	for (; count + 1 < cpus && count < MAX_WORKERS; count++) {
		workers[count] = fork();
		if (workers[count] < 0)
			break;
		if (workers[count] == 0) {
			prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0);
			work(fs, directory, shared, false);
			_exit(EXIT_SUCCESS);
		}
	}
	work(fs, directory, shared, progress);
	for (int i = 0; i < count; i++) {
		int status;

		failed |= waitpid(workers[i], &status, 0) < 0 || status != 0;
	}
	if (failed)
		errx(EXIT_FAILURE, "the image was not unpacked"); /* the worker has said why */
	walk_all(fs, directory, &(struct walk){.after = finish});
	fchmod(directory, (root.mode & 01777) | 0700);
	if (progress)
		fprintf(stderr, "\rExtracting 100%%\n");
	munmap(shared, sizeof(*shared));
}

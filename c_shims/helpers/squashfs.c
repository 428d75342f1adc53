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
enum { METADATA = 8192, FRAGMENTS_READ = 8, SHARE = 4 << 20, MAX_WORKERS = 16, MAX_DEPTH = 1024, SUPERBLOCK = 96 };

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
	uint8_t *file; /* all of it; the image is where data is */
	const uint8_t *data;
	size_t file_length, length;
	uint32_t inodes, block_size, fragments;
	uint16_t compression;
	uint64_t root, fragment_table;
	struct table inode_table, directory_table, xattr_table, xattr_ids;
	uint8_t *block;
	/* The ends of files that are beside each other in a directory are mostly in a few fragments. */
	struct fragment {
		uint32_t number;
		uint8_t *data;
		size_t length;
	} fragments_read[FRAGMENTS_READ];
	unsigned int next_fragment;
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
	struct inode inode = {
		.type = u16(f), .mode = u16(f + 2), .mtime = u32(f + 8), .number = u32(f + 12), .links = 1, .xattr = NONE
	};

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

struct walk;
typedef void visit(struct walk *w, int parent, const char *name, const char *path, const struct inode *inode, bool again);

/* One way through all files. A file with several names is there again at each but the first. */
struct walk {
	struct squashfs *fs;
	int top;              /* where it is unpacked, or -1 */
	visit *before, *after; /* after: of a directory, when what it holds has been visited */
	int depth;
	uint8_t *seen;  /* by inode number */
	char **links;   /* by inode number: the first name of a file with several */
	uint64_t bytes; /* of what was visited, blocks of 4 KiB counted in full */
	int worker, workers, forked; /* what a worker that was not forked would do falls to the first one */
	uint64_t total, percent; /* for progress, else 0 */
};

static void walk_directory(struct walk *w, const struct inode *directory, int fd, const char *path);

static void walk_entry(struct walk *w, int parent, const char *name, const char *path, const struct inode *inode)
{
	bool is_directory = inode->type == DIRECTORY, again = w->seen[inode->number];

	if (is_directory && again)
		damaged("a directory is in two places");
	w->seen[inode->number] = 1;
	if (!again)
		w->bytes += inode->type == FILE_ ? (inode->size + 4095) / 4096 * 4096 : 4096;
	if (w->before)
		w->before(w, parent, name, path, inode, again);
	if (is_directory) {
		AUTO_CLOSE fd = w->top < 0 ? -1 : openat(parent, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);

		if (w->top >= 0 && fd < 0)
			err(EXIT_FAILURE, "cannot open %s", path);
		walk_directory(w, inode, fd, path);
		if (w->after)
			w->after(w, parent, name, path, inode, again);
	}
}

static void walk_directory(struct walk *w, const struct inode *directory, int fd, const char *path)
{
	struct squashfs *fs = w->fs;
	size_t left;
	const uint8_t *p;

	if (directory->size <= 3) /* an empty one; the 3 stand for "." and ".." */
		return;
	if (++w->depth > MAX_DEPTH)
		damaged("its directories nest too deeply");
	p = lookup(&fs->directory_table, directory->block, directory->offset, &left);
	if (left > directory->size - 3)
		left = directory->size - 3;
	while (left) {
		const uint8_t *header = take(&p, &left, 12);
		uint32_t count = u32(header) + 1, block = u32(header + 4);

		for (; count; count--) {
			const uint8_t *entry = take(&p, &left, 8);
			size_t length = (size_t)u16(entry + 6) + 1;
			const uint8_t *bytes = take(&p, &left, length);
			struct inode inode = read_inode(fs, (uint64_t)block << 16 | u16(entry));
			AUTO_FREE inner = text("%s%s%.*s", path, *path ? "/" : "", (int)length, (const char *)bytes);
			const char *name = inner + strlen(path) + (*path != 0);

			if (length > 256 || memchr(bytes, '/', length) || memchr(bytes, 0, length) || !strcmp(name, ".") ||
			    !strcmp(name, ".."))
				damaged("a file has an impossible name");
			walk_entry(w, fd, name, inner, &inode);
		}
	}
	w->depth--;
}

static void walk_all(struct walk *w)
{
	struct inode root = read_inode(w->fs, w->fs->root);

	if (root.type != DIRECTORY)
		damaged("its root is no directory");
	w->seen = allocate((size_t)w->fs->inodes + 1);
	w->seen[root.number] = 1;
	w->bytes = 0;
	walk_directory(w, &root, w->top, "");
	free(w->seen);
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

static void map(struct squashfs *fs, const char *path, long long offset)
{
	AUTO_CLOSE fd = open(path, O_RDONLY | O_CLOEXEC);
	struct stat is;

	if (fd < 0 || fstat(fd, &is) < 0)
		err(EXIT_FAILURE, "cannot open %s", path);
	fs->file_length = (size_t)is.st_size;
	if ((size_t)offset > fs->file_length)
		errx(EXIT_FAILURE, "%s is truncated: %zu of more than %lld bytes", path, fs->file_length, offset);
	fs->file = mmap(NULL, fs->file_length ? fs->file_length : 1, PROT_READ, MAP_PRIVATE, fd, 0);
	if (fs->file == MAP_FAILED)
		err(EXIT_FAILURE, "cannot read %s", path);
	fs->data = fs->file + offset;
	fs->length = fs->file_length - (size_t)offset;
}

struct squashfs *squashfs_open(const char *path, long long offset)
{
	struct squashfs *fs = allocate(sizeof(*fs));
	const uint8_t *data;
	uint64_t end, table;

	map(fs, path, offset);
	data = fs->data;
	if (fs->length < SUPERBLOCK || memcmp(data, "hsqs", 4) || u16(data + 28) != 4)
		errx(EXIT_FAILURE, "not a squashfs 4 image");
	fs->inodes = u32(data + 4);
	fs->block_size = u32(data + 12);
	fs->fragments = u32(data + 16);
	fs->compression = u16(data + 20);
	fs->root = u64(data + 32);
	fs->fragment_table = u64(data + 80);
	if (u64(data + 40) > fs->length)
		errx(EXIT_FAILURE, "the image is truncated: %zu of %llu bytes", fs->length, (unsigned long long)u64(data + 40));
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
	fs->block = allocate(fs->block_size);
	return fs;
}

void squashfs_close(struct squashfs *fs)
{
	struct table *tables[] = { &fs->inode_table, &fs->directory_table, &fs->xattr_table, &fs->xattr_ids };

	for (size_t i = 0; i < LENGTH(tables); i++) {
		free(tables[i]->data);
		free(tables[i]->starts);
	}
	for (size_t i = 0; i < FRAGMENTS_READ; i++)
		free(fs->fragments_read[i].data);
	free(fs->block);
#ifdef HAVE_ZSTD
	ZSTD_freeDCtx(fs->zstd);
#endif
	munmap(fs->file, fs->file_length);
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

static const struct fragment *read_fragment(struct squashfs *fs, uint32_t number)
{
	uint8_t entries[METADATA];
	const uint8_t *entry = entries + (size_t)(number % 512) * 16, *data;
	struct fragment *fragment;
	uint64_t offset;

	if (number >= fs->fragments)
		damaged("a file's end is in no fragment");
	for (size_t i = 0; i < FRAGMENTS_READ; i++)
		if (fs->fragments_read[i].length && fs->fragments_read[i].number == number)
			return &fs->fragments_read[i];
	fragment = &fs->fragments_read[fs->next_fragment++ % FRAGMENTS_READ];
	if (!fragment->data)
		fragment->data = allocate(fs->block_size);
	offset = u64(at(fs, fs->fragment_table + (uint64_t)(number / 512) * 8, 8));
	if (read_metadata(fs, &offset, entries) < (size_t)(number % 512 + 1) * 16)
		damaged("its fragment table is cut off");
	data = read_block(fs, u64(entry), u32(entry + 8), fragment->data, &fragment->length);
	if (fragment->length > fs->block_size)
		damaged("a fragment is too long");
	if (data != fragment->data)
		memcpy(fragment->data, data, fragment->length);
	fragment->number = number;
	return fragment;
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
		const struct fragment *end = read_fragment(fs, inode->fragment);

		if (inode->offset > end->length || left > end->length - inode->offset)
			damaged("a file's end is beyond its fragment");
		put(fd, end->data + inode->offset, (size_t)left, path);
	}
	if (ftruncate(fd, (off_t)inode->size) < 0)
		err(EXIT_FAILURE, "cannot write %s", path);
}

uint64_t squashfs_size(struct squashfs *fs)
{
	struct walk w = { .fs = fs, .top = -1 };

	walk_all(&w);
	return w.bytes;
}

static void set_time(int parent, const char *name, const struct inode *inode)
{
	struct timespec times[2] = { { .tv_sec = inode->mtime }, { .tv_sec = inode->mtime } };

	utimensat(parent, name, times, AT_SYMLINK_NOFOLLOW);
}

/* First: all files, but without their content. From here on nothing is made any more, so that what is there can be
 * deleted whatever becomes of the workers. */
static void make(struct walk *w, int parent, const char *name, const char *path, const struct inode *inode, bool again)
{
	char **first = &w->links[inode->number];
	AUTO_CLOSE fd = -1;
	int status = 0;

	switch (inode->type) {
	case DIRECTORY:
		status = mkdirat(parent, name, (inode->mode & 0777) | 0700);
		break;
	case FILE_:
	case SYMLINK:
	case FIFO:
		if (again && !*first)
			damaged("a file has more names than it says");
		if (!again && inode->links > 1)
			*first = text("%s", path);
		if (again) {
			status = linkat(w->top, *first, parent, name, 0);
		} else if (inode->type == FILE_) {
			fd = openat(parent, name, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
			status = fd;
		} else if (inode->type == FIFO) {
			status = mkfifoat(parent, name, inode->mode & 0777);
		} else {
			AUTO_FREE target = text("%.*s", (int)inode->size, (const char *)inode->rest);

			status = symlinkat(target, parent, name);
			set_time(parent, name, inode);
		}
		break;
	default: /* devices come from the host, sockets from their servers */
		break;
	}
	if (status < 0)
		err(EXIT_FAILURE, "cannot create %s", path);
}

/* Then, in each worker: its share of what is in files. */
static void fill(struct walk *w, int parent, const char *name, const char *path, const struct inode *inode, bool again)
{
	int share = (int)(w->bytes / SHARE % (unsigned int)w->workers);
	AUTO_CLOSE fd = -1;

	if (w->total && w->bytes * 100 / w->total != w->percent)
		fprintf(stderr, "\rExtracting %u%%", (unsigned int)(w->percent = w->bytes * 100 / w->total));
	if (inode->type != FILE_ || again || (share != w->worker && (w->worker || share < w->forked)))
		return;
	fd = openat(parent, name, O_WRONLY | O_NOFOLLOW | O_CLOEXEC);
	if (fd < 0)
		err(EXIT_FAILURE, "cannot open %s", path);
	write_file(w->fs, fd, path, inode);
	set_xattrs(w->fs, inode, fd, path);
	if (fchmod(fd, inode->mode & 01777) < 0)
		err(EXIT_FAILURE, "cannot change the mode of %s", path);
	futimens(fd, (struct timespec[2]){ { .tv_sec = inode->mtime }, { .tv_sec = inode->mtime } });
}

/* Last: a directory's mode and time, which its content has changed. */
static void finish(struct walk *w, int parent, const char *name, const char *path, const struct inode *inode, bool again)
{
	(void)again;
	if (inode->xattr != NONE) {
		AUTO_CLOSE fd = openat(parent, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);

		if (fd < 0)
			err(EXIT_FAILURE, "cannot open %s", path);
		set_xattrs(w->fs, inode, fd, path);
	}
	fchmodat(parent, name, (inode->mode & 01777) | 0700, 0);
	set_time(parent, name, inode);
}

void squashfs_unpack(struct squashfs *fs, int directory, bool progress)
{
	struct walk w = { .fs = fs, .top = directory, .before = make, .workers = 1, .forked = 1 };
	struct inode root = read_inode(fs, fs->root);
	pid_t children[MAX_WORKERS];
	cpu_set_t cpus;
	bool failed = false;

	umask(0);
	w.links = allocate(((size_t)fs->inodes + 1) * sizeof(char *));
	walk_all(&w);
	for (size_t i = 0; i <= fs->inodes; i++)
		free(w.links[i]);
	free(w.links);
	w.before = fill;
	if (sched_getaffinity(0, sizeof(cpus), &cpus) == 0 && CPU_COUNT(&cpus) > 1)
		w.workers = CPU_COUNT(&cpus) < MAX_WORKERS ? CPU_COUNT(&cpus) : MAX_WORKERS;
	for (; w.forked < w.workers; w.forked++) {
		pid_t child = fork();

		if (child < 0)
			break;
		if (child == 0) {
			prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0);
			w.worker = w.forked;
			walk_all(&w);
			_exit(EXIT_SUCCESS);
		}
		children[w.forked] = child;
	}
	w.total = progress ? squashfs_size(fs) : 0;
	walk_all(&w);
	for (int i = 1; i < w.forked; i++) {
		int status;

		failed |= waitpid(children[i], &status, 0) < 0 || status != 0;
	}
	if (failed)
		errx(EXIT_FAILURE, "the image was not unpacked"); /* the worker has said why */
	walk_all(&(struct walk){ .fs = fs, .top = directory, .after = finish });
	fchmod(directory, (root.mode & 01777) | 0700);
	if (progress)
		fprintf(stderr, "\rExtracting 100%%\n");
}

/* Digests that detect whether a small file has changed. */
#ifndef PENROOT_DIGEST_H
#define PENROOT_DIGEST_H

#include <fcntl.h>
#include <inttypes.h>
#include <stdbool.h>
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>

enum { PENROOT_DIGEST_BYTES = 40 };

struct penroot_digest {
	uint64_t size, hash;
};

/* Compute FNV-1a of a regular file, and close its descriptor. Returns false if the file cannot be read. */
static inline bool penroot_digest_of(int fd, struct penroot_digest *digest)
{
	struct stat info;
	unsigned char block[4096];
	ssize_t length = -1;

	*digest = (struct penroot_digest){ .hash = 14695981039346656037U };
	if (fd >= 0 && fstat(fd, &info) == 0 && S_ISREG(info.st_mode)) {
		while ((length = read(fd, block, sizeof(block))) > 0) {
			digest->size += (uint64_t)length;
			for (ssize_t i = 0; i < length; i++)
				digest->hash = (digest->hash ^ block[i]) * 1099511628211U;
		}
	}
	if (fd >= 0)
		(void)close(fd);
	return length == 0;
}

static inline bool penroot_digest_at(const char *path, struct penroot_digest *digest)
{
	return penroot_digest_of(open(path, O_RDONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC), digest);
}

/* Write the digest of a file as a word for penroot_digest_parse(). Returns 0, or -1 if the file cannot be read. */
static inline int penroot_digest_format(const char *path, char word[PENROOT_DIGEST_BYTES])
{
	struct penroot_digest digest;

	if (!penroot_digest_at(path, &digest))
		return -1;
	(void)snprintf(word, PENROOT_DIGEST_BYTES, "%" PRIx64 ".%" PRIx64, digest.size, digest.hash);
	return 0;
}

static inline bool penroot_digest_parse(const char *word, struct penroot_digest *digest)
{
	return sscanf(word, "%" SCNx64 ".%" SCNx64, &digest->size, &digest->hash) == 2;
}

#endif

/* penroot-mount: do the mounts of an fstab(5), beneath a root directory.
 *
 * The grammar is that of enroot_py/runtime/mounts.py: fields may be missing, x-create=dir|file|auto
 * makes the target, x-move and x-detach move and detach, nofail and silent
 * forgive, ${VAR} is replaced and \040 is a space. Lines of one pass are done,
 * those of the others left for another call.
 */
#include "common.h"

#include "../linux.h"

#include <err.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <unistd.h>

/* open_tree(2), move_mount(2) and mount_setattr(2), for C libraries that do not know them. */
enum {
	TREE_CLONE = 0x01,
	FROM_EMPTY_PATH = 0x04,
	TO_EMPTY_PATH = 0x40,
	RECURSIVE = 0x8000,
	ATTR_RDONLY = 0x01,
	ATTR_NOSUID = 0x02,
	ATTR_NODEV = 0x04,
	ATTR_NOEXEC = 0x08,
	ATTR_NOATIME = 0x10,
	ATTR_STRICTATIME = 0x20,
	ATTR_NODIRATIME = 0x80,
	ATTR_ATIME = 0x70, /* the three values of a field */
};

enum { MAX_FIELDS = 6, MAX_OF_IMAGE = 1000 };

/* Flags of mount(2), and what they are to mount_setattr(2). */
static const struct {
	const char *set, *unset;
	unsigned long flag;
	uint64_t attribute;
} flags[] = {
	{ "ro", "rw", MS_RDONLY, ATTR_RDONLY },
	{ "nosuid", "suid", MS_NOSUID, ATTR_NOSUID },
	{ "nodev", "dev", MS_NODEV, ATTR_NODEV },
	{ "noexec", "exec", MS_NOEXEC, ATTR_NOEXEC },
	{ "noatime", "atime", MS_NOATIME, ATTR_NOATIME },
	{ "nodiratime", "diratime", MS_NODIRATIME, ATTR_NODIRATIME },
	{ "strictatime", "", MS_STRICTATIME, ATTR_STRICTATIME },
	{ "sync", "", MS_SYNCHRONOUS, 0 },
	{ "dirsync", "", MS_DIRSYNC, 0 },
};

static const struct {
	const char *name; /* with an "r" before it, of all that is beneath, too */
	unsigned long flag;
} propagations[] = {
	{ "shared", MS_SHARED },
	{ "slave", MS_SLAVE },
	{ "private", MS_PRIVATE },
	{ "unbindable", MS_UNBINDABLE },
};

/* The bits of an entry, and their words. */
enum {
	BIND = 1 << 0,
	RBIND = 1 << 1,
	REMOUNT = 1 << 2,
	MOVE = 1 << 3,
	DETACH = 1 << 4,
	NOFAIL = 1 << 5,
	SILENT = 1 << 6,
	CREATE_DIR = 1 << 7,
	CREATE_FILE = 1 << 8,
	CREATE_AUTO = 1 << 9,
	CREATE = CREATE_DIR | CREATE_FILE | CREATE_AUTO,
};
static const char *const kinds[] = {
	"bind", "rbind", "remount", "x-move", "x-detach", "nofail", "silent", "x-create=dir", "x-create=file", "x-create=auto",
};

/* What means nothing here, but is no option of a file system either. */
static const char *const ignored[] = {
	"defaults", "auto",       "noauto",  "user",   "nouser",   "users",      "nousers",    "owner",
	"noowner",  "group",      "nogroup", "loud",   "async",    "relatime",   "norelatime", "nostrictatime",
	"iversion", "noiversion", "mand",    "nomand", "lazytime", "nolazytime",
};

/* A line; what it takes is not freed, as the program ends with the last of them. */
struct entry {
	const char *origin;
	int line, pass;
	bool image; /* of an image's fstab, which reaches nothing of the host */
	const char *inside; /* a source beneath the root: its path there */
	char *source, *target, *type, *options;
	unsigned int is;
	unsigned long flags, propagation;
	uint64_t attributes;
	char *data; /* what the file system itself is told */
};

/* Whether a word is an option that is known here. */
static bool apply(struct entry *e, const char *word)
{
	for (size_t i = 0; i < LENGTH(flags); i++) {
		if (!strcmp(word, flags[i].set)) {
			e->flags |= flags[i].flag;
			e->attributes |= flags[i].attribute;
			return true;
		}
		if (!strcmp(word, flags[i].unset)) {
			e->flags &= ~flags[i].flag;
			e->attributes &= ~flags[i].attribute;
			return true;
		}
	}
	for (size_t i = 0; i < LENGTH(propagations); i++) {
		bool recursive = *word == 'r';

		if (!strcmp(word + recursive, propagations[i].name)) {
			e->propagation = propagations[i].flag | (recursive ? MS_REC : 0);
			return true;
		}
	}
	for (size_t i = 0; i < LENGTH(kinds); i++) {
		if (!strcmp(word, kinds[i])) {
			e->is = (1U << i & CREATE ? e->is & ~(unsigned int)CREATE : e->is) | 1U << i;
			return true;
		}
	}
	for (size_t i = 0; i < LENGTH(ignored); i++)
		if (!strcmp(word, ignored[i]))
			return true;
	return false;
}

static bool are_options(const char *field)
{
	return *field != '/' && (strchr(field, ',') || apply(&(struct entry){ 0 }, field));
}

/* fstab(5): "\040" and its like are characters that would separate fields. */
static void decode(char *field)
{
	char *to = field;

	for (const char *at = field; *at; at++) {
		if (*at == '\\' && at[1] >= '0' && at[1] <= '3' && at[2] >= '0' && at[2] <= '7' && at[3] >= '0' && at[3] <= '7' &&
		    (at[1] | at[2] | at[3]) != '0') {
			*to++ = (char)((at[1] - '0') << 6 | (at[2] - '0') << 3 | (at[3] - '0'));
			at += 3;
		} else {
			*to++ = *at;
		}
	}
	*to = '\0';
}

static void parse_words(struct entry *e)
{
	char *rest = text("%s", e->options);

	e->data = text("%s", "");
	for (char *word; (word = strsep(&rest, ","));) {
		if (!*word || apply(e, word))
			continue;
		if (!strcmp(e->type, "none"))
			errx(EXIT_FAILURE, "%s:%d: unknown mount option '%s'", e->origin, e->line, word);
		e->data = text("%s%s%s", e->data, *e->data ? "," : "", word);
	}
}

/* The one variable of an image's fstab. */
static char *substitute_rootfs(const char *word)
{
	static const char variable[] = "${ENROOT_ROOTFS}";
	const char *rootfs = getenv("ENROOT_ROOTFS");
	bool has_it = rootfs && !strncmp(word, variable, strlen(variable));

	return text("%s%s", has_it ? rootfs : "", has_it ? word + strlen(variable) : word);
}

/* An image mounts a tmpfs, or directories of its own. */
static void confine(struct entry *e)
{
	bool bind = e->is & (BIND | RBIND), tmpfs = !strcmp(e->type, "tmpfs");

	if (e->is & (REMOUNT | MOVE | DETACH) || bind == tmpfs || (bind && (!e->inside || strcmp(e->type, "none"))))
		errx(EXIT_FAILURE,
		     "%s:%d: an image may mount a tmpfs and its own directories, not '%s'; "
		     "if you trust it: ENROOT_IMAGE_FSTAB=host, or --mount",
		     e->origin, e->line, e->source);
	e->flags |= MS_NOSUID | MS_NODEV;
	e->attributes |= ATTR_NOSUID | ATTR_NODEV;
	e->is = (e->is & ~(unsigned int)RBIND) | (bind ? BIND : 0);
}

static const char *inside(const char *source)
{
	const char *rootfs = getenv("ENROOT_ROOTFS");
	size_t n = rootfs ? strlen(rootfs) : 0;

	if (!n || *rootfs != '/' || strncmp(source, rootfs, n) || (source[n] && source[n] != '/'))
		return NULL;
	return source[n] ? source + n : "/";
}

/* One line to an entry; false where it is blank or a comment. */
static bool parse(char *line, struct entry *e)
{
	char *fields[MAX_FIELDS + 1] = { 0 }, **field = fields, *word;
	int n = 0;

	line += strspn(line, " \t\r");
	if (!*line || *line == '#')
		return false;
	while ((word = strsep(&line, " \t\r"))) {
		if (!*word)
			continue;
		if (n == MAX_FIELDS)
			errx(EXIT_FAILURE, "%s:%d: more than %d fields; write a space as \\040", e->origin, e->line, MAX_FIELDS);
		fields[n] = e->image ? substitute_rootfs(word) : substitute(word);
		decode(fields[n++]);
	}
	/* A frequency means nothing here: a number that stands alone is the pass. */
	for (int i = 4; i < n; i++) {
		char *end;
		long pass = strtol(fields[i], &end, 10);

		if (*end || !*fields[i] || pass < INT_MIN || pass > INT_MAX)
			errx(EXIT_FAILURE, "%s:%d: passno must be a number, not '%s'", e->origin, e->line, fields[i]);
		if (pass)
			e->pass = (int)pass;
	}
	fields[n < 4 ? n : 4] = NULL;
	e->source = *field++;
	e->target = *field && !are_options(*field) ? *field++ : e->source;
	if (!strcmp(e->target, "none") && *field && are_options(*field))
		e->target = e->source;
	e->type = *field && !are_options(*field) ? *field++ : "none";
	/* "tmpfs /tmp" is a tmpfs, not a bind mount of a file of that name. */
	if (!strcmp(e->type, "none") && !strcmp(e->source, "tmpfs"))
		e->type = "tmpfs";
	if (!strcmp(e->type, "sqsh"))
		errx(EXIT_FAILURE, "%s:%d: cannot mount %s: a squashfs file needs penroot start or srun", e->origin, e->line,
		     e->source);
	e->options = *field ? *field : strcmp(e->type, "none") ? "" : "rbind,x-create=auto";
	parse_words(e);
	e->inside = inside(e->source);
	if (e->image)
		confine(e);
	return true;
}

static int set_attributes(const struct entry *e, int fd, bool recursive)
{
	uint64_t clear = e->attributes & (ATTR_NOATIME | ATTR_STRICTATIME) ? ATTR_ATIME : 0;

	return linux_mount_setattr(fd, "", AT_EMPTY_PATH | (recursive ? RECURSIVE : 0), e->attributes, clear,
				   e->propagation & ~(unsigned long)MS_REC);
}

/* Read-only covers what is mounted beneath, too. */
static int bind_source(const struct entry *e, const char *source, int target)
{
	unsigned int recursive = e->is & RBIND ? RECURSIVE : 0;
	AUTO_CLOSE tree = linux_open_tree(AT_FDCWD, source, TREE_CLONE | O_CLOEXEC | recursive);

	if (tree < 0 && errno == EINVAL && !recursive) {
		/* Submounts that the parent namespace locked cannot be left out. */
		recursive = RECURSIVE;
		tree = linux_open_tree(AT_FDCWD, source, TREE_CLONE | O_CLOEXEC | recursive);
	}
	if (tree < 0 || ((e->attributes || e->propagation) && set_attributes(e, tree, recursive) < 0))
		return -1;
	return linux_move_mount(tree, "", target, "", FROM_EMPTY_PATH | TO_EMPTY_PATH);
}

static int open_target(const struct entry *e, const char *source, int root)
{
	struct stat is, top;
	bool directory = e->is & (CREATE_DIR | CREATE_AUTO);

	/* A file covers a link of the image itself, not the file that it points to. */
	if (e->is & (BIND | RBIND) && stat(source, &is) == 0 && !S_ISDIR(is.st_mode)) {
		int found = open_in(root, e->target, O_PATH | O_NOFOLLOW);

		if (found >= 0 || errno != ENOENT)
			return found;
	}
	if (!(e->is & CREATE))
		return open_in(root, e->target, O_PATH);
	if (e->is & CREATE_AUTO && e->is & (BIND | RBIND)) {
		if (stat(source, &is) < 0)
			return -1;
		directory = S_ISDIR(is.st_mode);
	}
	/* Where the root is the host's own, all of it is. */
	bool hosts = stat("/", &top) == 0 && fstat(root, &is) == 0 && is.st_dev == top.st_dev && is.st_ino == top.st_ino;
	return create_in(root, e->target, directory ? S_IFDIR : S_IFREG, directory ? 0755 : 0644,
			 hosts    ? ANYWHERE :
			 e->image ? OWN :
				    NAMED);
}

/* An image does not cover what the host lends, as /proc, nor the root, where the other mounts are. */
static bool leave_out(const struct entry *e, int root, int target, int source)
{
	struct stat is, top;
	const char *why = NULL;

	if (fstat(target, &is) == 0 && fstat(root, &top) == 0 && is.st_dev == top.st_dev && is.st_ino == top.st_ino)
		why = "it is the root directory";
	else if (!is_own(root, target) || (source >= 0 && !is_own(root, source)))
		why = "it is mounted from the host";
	if (why)
		warnx("%s:%d: %s is left out: %s", e->origin, e->line, e->target, why);
	return why;
}

static int execute(const struct entry *e, int root)
{
	AUTO_CLOSE from = e->inside ? open_in(root, e->inside, O_PATH) : -1;
	AUTO_CLOSE target = -1;
	const char *source, *path;

	if (from < 0 && e->inside && !strcmp(e->inside, e->target))
		from = create_in(root, e->inside, S_IFDIR, 0755, OWN); /* a volume that the image has no directory for */
	if (from < 0 && e->inside)
		return -1;
	source = e->inside ? text("/proc/self/fd/%d", from) : e->source;
	target = open_target(e, source, root);
	if (target < 0)
		return -1;
	path = text("/proc/self/fd/%d", target);
	if (e->image && leave_out(e, root, target, from))
		return 0;
	if (e->is & DETACH)
		return umount2(path, MNT_DETACH);
	if (e->is & REMOUNT || (!(e->is & (MOVE | BIND | RBIND)) && !strcmp(e->type, "none")))
		return set_attributes(e, target, e->is & RBIND || e->propagation & MS_REC);
	if (e->is & MOVE)
		return mount(source, path, NULL, MS_MOVE, NULL);
	if (e->is & (BIND | RBIND))
		return bind_source(e, source, target);
	if (mount(e->source, path, e->type, e->flags, e->data) < 0)
		return -1;
	if (!e->propagation)
		return 0;
	/* The older descriptor still means what is beneath. */
	close_fd(&target);
	target = open_in(root, e->target, O_PATH);
	return target < 0 ? -1 : mount(NULL, text("/proc/self/fd/%d", target), NULL, e->propagation, NULL);
}

static void mount_fstab(const char *name, int root, int pass, bool image)
{
	AUTO_CLOSE fd = !strcmp(name, "-") ? dup(STDIN_FILENO) : open(name, O_RDONLY | O_CLOEXEC);
	AUTO_FREE all = fd < 0 ? NULL : read_all(fd, NULL);
	char *rest = all, *line;
	int number = 0, count = 0;

	if (!all)
		err(EXIT_FAILURE, "cannot read %s", name);
	while ((line = strsep(&rest, "\n"))) {
		struct entry e = { .origin = image             ? "/etc/fstab of the image" :
					     strcmp(name, "-") ? name :
								 "stdin",
				   .line = ++number,
				   .image = image };

		if (!parse(line, &e))
			continue;
		if (image && ++count > MAX_OF_IMAGE)
			errx(EXIT_FAILURE, "%s:%d: an image may mount %d directories, no more", e.origin, number, MAX_OF_IMAGE);
		if (e.pass != pass || execute(&e, root) == 0)
			continue;
		if (image && errno == EXDEV) {
			warnx("%s:%d: %s is left out: it leads to what is mounted from the host", e.origin, number, e.target);
			continue;
		}
		if (!(e.is & NOFAIL) && errno == EXDEV)
			errx(EXIT_FAILURE, "%s:%d: cannot mount on %s: it leads to what is mounted from the host", e.origin, number,
			     e.target);
		if (!(e.is & NOFAIL))
			err(EXIT_FAILURE, "%s:%d: cannot %s %s on %s", e.origin, number, e.is & DETACH ? "detach" : "mount", e.source,
			    e.target);
		if (!(e.is & SILENT))
			warn("%s:%d: cannot mount %s on %s", e.origin, number, e.source, e.target);
	}
}

int main(int argc, char **argv)
{
	const char *directory = "/", *pass = "0", *image = NULL;
	const struct word words[] = {
		{ "--root", .value = &directory }, { "--image", .value = &image }, { "--pass", .value = &pass }, { 0 }
	};
	int flags = 0, at = parse_options(argv, 1, words, &flags);
	AUTO_CLOSE root = -1;
	char *end;
	int number = (int)strtol(pass, &end, 10);

	if (*end || !*pass)
		errx(EXIT_FAILURE, "--pass must be a number, not '%s'", pass);
	if (flags & HELP || (at >= argc && !image)) {
		printf("Usage: %s [--root DIR] [--pass N] [--image FSTAB] FSTAB...\n\n"
		       "Do the mounts of fstab files whose passno is N (0), beneath DIR (/). '-' is stdin. --image is that of an\n"
		       "image: it mounts a tmpfs, and directories beneath DIR, which is in ENROOT_ROOTFS.\n",
		       program_invocation_short_name);
		return EXIT_SUCCESS;
	}
	root = open_root(directory);
	umask(022);
	if (image)
		mount_fstab(image, root, number, true);
	for (; argv[at]; at++)
		mount_fstab(argv[at], root, number, false);
	return EXIT_SUCCESS;
}

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

enum word { SET, UNSET, FS_FLAG, PROPAGATION, BIND, RBIND, REMOUNT, MOVE, DETACH, NOFAIL, SILENT, CREATE, NOTHING };

static const struct {
	const char *name;
	enum word word;
	unsigned long flag, attribute; /* of mount(2), of mount_setattr(2) */
} words[] = {
	{"ro", SET, MS_RDONLY, ATTR_RDONLY},
	{"nosuid", SET, MS_NOSUID, ATTR_NOSUID},
	{"nodev", SET, MS_NODEV, ATTR_NODEV},
	{"noexec", SET, MS_NOEXEC, ATTR_NOEXEC},
	{"noatime", SET, MS_NOATIME, ATTR_NOATIME},
	{"nodiratime", SET, MS_NODIRATIME, ATTR_NODIRATIME},
	{"strictatime", SET, MS_STRICTATIME, ATTR_STRICTATIME},
	{"rw", UNSET, MS_RDONLY, ATTR_RDONLY},
	{"suid", UNSET, MS_NOSUID, ATTR_NOSUID},
	{"dev", UNSET, MS_NODEV, ATTR_NODEV},
	{"exec", UNSET, MS_NOEXEC, ATTR_NOEXEC},
	{"atime", UNSET, MS_NOATIME, ATTR_NOATIME},
	{"diratime", UNSET, MS_NODIRATIME, ATTR_NODIRATIME},
	{"sync", FS_FLAG, MS_SYNCHRONOUS, 0},
	{"dirsync", FS_FLAG, MS_DIRSYNC, 0},
	{"shared", PROPAGATION, MS_SHARED, 0},
	{"slave", PROPAGATION, MS_SLAVE, 0},
	{"private", PROPAGATION, MS_PRIVATE, 0},
	{"unbindable", PROPAGATION, MS_UNBINDABLE, 0},
	{"rshared", PROPAGATION, MS_SHARED | MS_REC, 0},
	{"rslave", PROPAGATION, MS_SLAVE | MS_REC, 0},
	{"rprivate", PROPAGATION, MS_PRIVATE | MS_REC, 0},
	{"runbindable", PROPAGATION, MS_UNBINDABLE | MS_REC, 0},
	{"bind", BIND, 0, 0},
	{"rbind", RBIND, 0, 0},
	{"remount", REMOUNT, 0, 0},
	{"x-move", MOVE, 0, 0},
	{"x-detach", DETACH, 0, 0},
	{"nofail", NOFAIL, 0, 0},
	{"silent", SILENT, 0, 0},
	{"x-create=dir", CREATE, 'd', 0},
	{"x-create=file", CREATE, 'f', 0},
	{"x-create=auto", CREATE, 'a', 0},
	/* What means nothing here, but is no option of a file system either. */
	{"defaults", NOTHING, 0, 0},
	{"auto", NOTHING, 0, 0},
	{"noauto", NOTHING, 0, 0},
	{"user", NOTHING, 0, 0},
	{"nouser", NOTHING, 0, 0},
	{"users", NOTHING, 0, 0},
	{"nousers", NOTHING, 0, 0},
	{"owner", NOTHING, 0, 0},
	{"noowner", NOTHING, 0, 0},
	{"group", NOTHING, 0, 0},
	{"nogroup", NOTHING, 0, 0},
	{"loud", NOTHING, 0, 0},
	{"async", NOTHING, 0, 0},
	{"relatime", NOTHING, 0, 0},
	{"norelatime", NOTHING, 0, 0},
	{"nostrictatime", NOTHING, 0, 0},
	{"iversion", NOTHING, 0, 0},
	{"noiversion", NOTHING, 0, 0},
	{"mand", NOTHING, 0, 0},
	{"nomand", NOTHING, 0, 0},
	{"lazytime", NOTHING, 0, 0},
	{"nolazytime", NOTHING, 0, 0},
};

struct entry {
	const char *origin;
	int line, pass;
	bool image; /* of an image's fstab, which reaches nothing of the host */
	const char *inside; /* a source beneath the root: its path there */
	char *source, *target, *type, *options;
	bool is[NOTHING + 1];
	char create;
	unsigned long flags, propagation;
	uint64_t attributes;
	char *data; /* what the file system itself is told */
};

static ssize_t find_word(const char *name)
{
	for (size_t i = 0; i < LENGTH(words); i++)
		if (!strcmp(words[i].name, name))
			return (ssize_t)i;
	return -1;
}

static bool are_options(const char *field)
{
	return strchr(field, ',') || find_word(field) >= 0;
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

static void parse_options(struct entry *e)
{
	AUTO_FREE copy = strdup(e->options);
	char *rest = copy, *word;

	e->data = calloc(1, strlen(e->options) + 1);
	if (!copy || !e->data)
		err(EXIT_FAILURE, "cannot allocate memory");
	while ((word = strsep(&rest, ","))) {
		ssize_t i = find_word(word);

		if (!*word)
			continue;
		if (i < 0) {
			if (!strcmp(e->type, "none"))
				errx(EXIT_FAILURE, "%s:%d: unknown mount option '%s'", e->origin, e->line, word);
			if (*e->data)
				strcat(e->data, ",");
			strcat(e->data, word);
			continue;
		}
		e->is[words[i].word] = true;
		switch (words[i].word) {
		case SET:
			e->attributes |= words[i].attribute;
			/* fall through */
		case FS_FLAG:
			e->flags |= words[i].flag;
			break;
		case UNSET:
			e->attributes &= ~words[i].attribute;
			e->flags &= ~words[i].flag;
			break;
		case PROPAGATION:
			e->propagation = words[i].flag;
			break;
		case CREATE:
			e->create = (char)words[i].flag;
			break;
		default:
			break;
		}
	}
}

/* The one variable of an image's fstab. */
static char *substitute_rootfs(const char *word)
{
	static const char variable[] = "${ENROOT_ROOTFS}";
	const char *rootfs = getenv("ENROOT_ROOTFS");

	if (!rootfs || strncmp(word, variable, strlen(variable)))
		return strdup(word);
	return text("%s%s", rootfs, word + strlen(variable));
}

/* An image mounts a tmpfs, or directories of its own. */
static void confine(struct entry *e)
{
	bool bind = e->is[BIND] || e->is[RBIND], tmpfs = !strcmp(e->type, "tmpfs");

	if (e->is[REMOUNT] || e->is[MOVE] || e->is[DETACH] || bind == tmpfs ||
	    (bind && (!e->inside || strcmp(e->type, "none"))))
		errx(EXIT_FAILURE,
		     "%s:%d: an image may mount a tmpfs and its own directories, not '%s'; "
		     "if you trust it: ENROOT_IMAGE_FSTAB=host, or --mount",
		     e->origin, e->line, e->source);
	e->flags |= MS_NOSUID | MS_NODEV;
	e->attributes |= ATTR_NOSUID | ATTR_NODEV;
	e->is[RBIND] = false;
	e->is[BIND] = bind;
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
	char *fields[MAX_FIELDS + 1] = {0}, **field = fields, *word;
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
		if (!fields[n])
			err(EXIT_FAILURE, "cannot allocate memory");
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
		free(fields[i]);
	}
	fields[n < 4 ? n : 4] = NULL;
	e->source = *field++;
	e->target = *field && !are_options(*field) ? *field++ : strdup(e->source);
	if (e->target && !strcmp(e->target, "none") && *field && are_options(*field)) {
		free(e->target);
		e->target = strdup(e->source);
	}
	e->type = *field && !are_options(*field) ? *field++ : strdup("none");
	/* "tmpfs /tmp" is a tmpfs, not a bind mount of a file of that name. */
	if (e->type && !strcmp(e->type, "none") && !strcmp(e->source, "tmpfs")) {
		free(e->type);
		e->type = strdup("tmpfs");
	}
	e->options = *field ? *field : strdup(strcmp(e->type, "none") ? "" : "rbind,x-create=auto");
	if (!e->target || !e->type || !e->options)
		err(EXIT_FAILURE, "cannot allocate memory");
	parse_options(e);
	e->inside = inside(e->source);
	if (e->image)
		confine(e);
	return true;
}

static void free_entry(struct entry *e)
{
	free(e->source);
	free(e->target);
	free(e->type);
	free(e->options);
	free(e->data);
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
	unsigned int recursive = e->is[RBIND] ? RECURSIVE : 0;
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
	bool directory = e->create == 'd';

	if (!e->create)
		return open_in(root, e->target, O_PATH);
	if (e->create == 'a') {
		directory = true;
		if (e->is[BIND] || e->is[RBIND]) {
			if (stat(source, &is) < 0)
				return -1;
			directory = S_ISDIR(is.st_mode);
		}
	}
	/* Where the root is the host's own, all of it is. */
	if (stat("/", &top) == 0 && fstat(root, &is) == 0 && is.st_dev == top.st_dev && is.st_ino == top.st_ino)
		return create_in(root, e->target, directory ? S_IFDIR : S_IFREG, directory ? 0755 : 0644, ANYWHERE);
	return create_in(root, e->target, directory ? S_IFDIR : S_IFREG, directory ? 0755 : 0644, e->image ? OWN : NAMED);
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
	AUTO_FREE beneath = NULL;
	const char *source = e->source;
	AUTO_CLOSE target = -1;
	AUTO_FREE path = NULL;
	AUTO_CLOSE top = -1;

	if (from < 0 && e->inside && !strcmp(e->inside, e->target))
		from = create_in(root, e->inside, S_IFDIR, 0755, OWN); /* a volume that the image has no directory for */
	if (from < 0 && e->inside)
		return -1;
	if (e->inside)
		source = beneath = text("/proc/self/fd/%d", from);
	target = open_target(e, source, root);
	if (target < 0)
		return -1;
	path = text("/proc/self/fd/%d", target);
	if (e->image && leave_out(e, root, target, from))
		return 0;
	if (e->is[DETACH])
		return umount2(path, MNT_DETACH);
	if (e->is[REMOUNT])
		return set_attributes(e, target, e->is[RBIND] || e->propagation & MS_REC);
	if (e->is[MOVE])
		return mount(source, path, NULL, MS_MOVE, NULL);
	if (e->is[BIND] || e->is[RBIND])
		return bind_source(e, source, target);
	if (!strcmp(e->type, "none"))
		return set_attributes(e, target, e->is[RBIND] || e->propagation & MS_REC);
	if (mount(e->source, path, e->type, e->flags, e->data) < 0)
		return -1;
	/* The older descriptor still means what is beneath. */
	top = open_in(root, e->target, O_PATH);
	if (top < 0 || !e->propagation)
		return top < 0 ? -1 : 0;
	free(path);
	path = text("/proc/self/fd/%d", top);
	return mount(NULL, path, NULL, e->propagation, NULL);
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
		CLEANUP(free_entry) struct entry e = {
			.origin = image ? "/etc/fstab of the image" : strcmp(name, "-") ? name : "stdin", .line = ++number, .image = image};

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
		if (!e.is[NOFAIL] && errno == EXDEV)
			errx(EXIT_FAILURE, "%s:%d: cannot mount on %s: it leads to what is mounted from the host", e.origin, number,
			     e.target);
		if (!e.is[NOFAIL])
			err(EXIT_FAILURE, "%s:%d: cannot %s %s on %s", e.origin, number, e.is[DETACH] ? "detach" : "mount",
			    e.source, e.target);
		if (!e.is[SILENT])
			warn("%s:%d: cannot mount %s on %s", e.origin, number, e.source, e.target);
	}
}

int main(int argc, char **argv)
{
	const char *directory = "/", *value, *image = NULL;
	AUTO_CLOSE root = -1;
	int at = 1, pass = 0;

	while (argv[at] && argv[at][0] == '-' && argv[at][1]) {
		if ((value = option(argv, &at, "--root"))) {
			directory = value;
		} else if ((value = option(argv, &at, "--image"))) {
			image = value;
		} else if ((value = option(argv, &at, "--pass"))) {
			char *end;

			pass = (int)strtol(value, &end, 10);
			if (*end || !*value)
				errx(EXIT_FAILURE, "--pass must be a number, not '%s'", value);
		} else if (!strcmp(argv[at], "--help") || !strcmp(argv[at], "-h")) {
			at = argc;
		} else {
			errx(EXIT_FAILURE, "unknown option: %s", argv[at]);
		}
	}
	if (at >= argc && !image) {
		printf("Usage: %s [--root DIR] [--pass N] [--image FSTAB] FSTAB...\n\n"
		       "Do the mounts of fstab files whose passno is N (0), beneath DIR (/). '-' is stdin. --image is that of an\n"
		       "image: it mounts a tmpfs, and directories beneath DIR, which is in ENROOT_ROOTFS.\n",
		       program_invocation_short_name);
		return EXIT_SUCCESS;
	}
	root = open_root(directory);
	umask(022);
	if (image)
		mount_fstab(image, root, pass, true);
	for (; argv[at]; at++)
		mount_fstab(argv[at], root, pass, false);
	return EXIT_SUCCESS;
}

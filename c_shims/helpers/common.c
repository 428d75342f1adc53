#include "common.h"

#include "../linux.h"

#include <dirent.h>
#include <err.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/openat2.h>
#include <net/if.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

enum { MAX_SYMLINKS = 40 /* path_resolution(7) */, LARGEST = 64 << 20 };

void close_fd(int *fd)
{
	if (*fd >= 0)
		close(*fd);
}

void free_text(char **text)
{
	free(*text);
}

void close_dir(void *dir)
{
	if (*(DIR **)dir)
		closedir(*(DIR **)dir);
}

char *text(const char *format, ...)
{
	va_list arguments;
	char *out;

	va_start(arguments, format);
	if (vasprintf(&out, format, arguments) < 0)
		err(EXIT_FAILURE, "cannot allocate memory");
	va_end(arguments);
	return out;
}

char *read_all(int fd, size_t *length)
{
	char *data = NULL, block[1 << 16];
	size_t size = 0;
	FILE *to = open_memstream(&data, &size);
	int error = to ? 0 : errno;

	while (!error) {
		ssize_t n = read(fd, block, sizeof(block));

		if (n == 0)
			break;
		if (n < 0 && errno != EINTR)
			error = errno;
		if (n > 0 && (fwrite(block, 1, (size_t)n, to) != (size_t)n || ftello(to) > LARGEST))
			error = EFBIG;
	}
	if (to && fclose(to) != 0 && !error)
		error = errno;
	if (length)
		*length = size;
	if (!error)
		return data;
	free(data);
	errno = error;
	return NULL;
}

bool write_all(int fd, const void *data, size_t length)
{
	for (const char *at = data; length;) {
		ssize_t n = write(fd, at, length);

		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0)
			return false;
		at += n;
		length -= (size_t)n;
	}
	return true;
}

int parse_options(char **argv, int at, const struct word *words, int *flags)
{
	while (argv[at] && argv[at][0] == '-' && argv[at][1]) {
		const char *argument = argv[at++];
		const struct word *word = words;
		size_t n = strcspn(argument, "=");

		if (!strcmp(argument, "--"))
			break;
		if (!strcmp(argument, "--help") || !strcmp(argument, "-h")) {
			*flags |= HELP;
			break;
		}
		while (word->name && (strncmp(word->name, argument, n) || word->name[n] || (argument[n] && word->bit)))
			word++;
		if (!word->name)
			errx(EXIT_FAILURE, "unknown option: %s", argument);
		*flags |= word->bit;
		if (word->bit)
			continue;
		if (!argument[n] && !argv[at])
			errx(EXIT_FAILURE, "option %s needs a value", word->name);
		*(word->list ? (*word->list)++ : word->value) = argument[n] ? argument + n + 1 : argv[at++];
	}
	return at;
}

static void write_text(const char *path, const char *content)
{
	AUTO_CLOSE fd = open(path, O_WRONLY | O_CLOEXEC);

	if (fd < 0 || !write_all(fd, content, strlen(content)))
		err(EXIT_FAILURE, "cannot write %s to %s", content, path);
}

static bool says(const char *path, char digit)
{
	AUTO_CLOSE fd = open(path, O_RDONLY | O_CLOEXEC);
	char c;

	return fd >= 0 && read(fd, &c, 1) == 1 && c == digit;
}

static void __attribute__((noreturn)) refused(const char *what)
{
	const char *advice = "";

	if (says("/proc/sys/user/max_user_namespaces", '0'))
		advice = "; as root: sysctl -w user.max_user_namespaces=65536";
	else if (says("/proc/sys/kernel/unprivileged_userns_clone", '0'))
		advice = "; as root: sysctl -w kernel.unprivileged_userns_clone=1";
	else if (says("/proc/sys/kernel/apparmor_restrict_unprivileged_userns", '1'))
		advice = "; as root: sysctl -w kernel.apparmor_restrict_unprivileged_userns=0, or an AppArmor profile";
	errx(EXIT_FAILURE, "cannot create %s: %s%s", what, strerror(errno), advice);
}

void enter_user(uid_t uid, gid_t gid)
{
	uid_t outer_uid = geteuid();
	gid_t outer_gid = getegid();
	AUTO_FREE uids = text("%u %u 1", uid, outer_uid);
	AUTO_FREE gids = text("%u %u 1", gid, outer_gid);

	/* After setresuid(2) the files of /proc/self belong to root, proc(5). */
	prctl(PR_SET_DUMPABLE, 1, 0, 0, 0);
	if (unshare(CLONE_NEWUSER) < 0)
		refused("a user namespace");
	write_text("/proc/self/setgroups", "deny");
	write_text("/proc/self/uid_map", uids);
	write_text("/proc/self/gid_map", gids);
}

/* A new network namespace has a loopback interface, which is down. netdevice(7) */
static void raise_loopback(void)
{
	struct ifreq request = { .ifr_name = "lo" };
	AUTO_CLOSE fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);

	if (fd < 0 || ioctl(fd, SIOCGIFFLAGS, &request) < 0)
		err(EXIT_FAILURE, "cannot find the loopback interface");
	request.ifr_flags |= IFF_UP;
	if (ioctl(fd, SIOCSIFFLAGS, &request) < 0)
		err(EXIT_FAILURE, "cannot bring up the loopback interface");
}

void enter_namespaces(int flags)
{
	if (unshare(flags) < 0) {
		/* Cgroup namespaces may be configured out; nothing depends on them. */
		if (errno != EINVAL || !(flags & CLONE_NEWCGROUP) || unshare(flags & ~CLONE_NEWCGROUP) < 0)
			refused("namespaces");
	}
	if (flags & CLONE_NEWNET)
		raise_loopback();
}

/* Capabilities survive exec only as ambient ones, unless the caller is root inside. capabilities(7) */
void keep_capabilities(void)
{
	uint64_t all;

	if (linux_capget_permitted(&all) < 0)
		err(EXIT_FAILURE, "cannot read capabilities");
	if (linux_capset(all, all, all) < 0)
		err(EXIT_FAILURE, "cannot set capabilities");
	for (unsigned int n = 0; n < 64; n++)
		if (all & 1ULL << n && prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE, n, 0, 0) < 0)
			err(EXIT_FAILURE, "cannot set capabilities");
}

static volatile sig_atomic_t forward_to;
static const int forwarded[] = { SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2, SIGWINCH, SIGCONT };

static void pass_on(int signal, siginfo_t *info, void *context)
{
	(void)context;
	/* The terminal signals its whole process group: the child has got this one. */
	if (forward_to > 0 && info->si_code != SI_KERNEL)
		kill((pid_t)forward_to, signal);
}

/* Handlers would end with exec(3), but before it they would only swallow signals; what the caller ignores stays ignored,
 * nohup(1). */
static void handle(struct sigaction action)
{
	for (size_t i = 0; i < LENGTH(forwarded); i++) {
		struct sigaction old;

		if (sigaction(forwarded[i], NULL, &old) == 0 && old.sa_handler != SIG_IGN)
			sigaction(forwarded[i], &action, NULL);
	}
}

pid_t fork_heard(void)
{
	pid_t child;

	handle((struct sigaction){ .sa_sigaction = pass_on, .sa_flags = SA_SIGINFO | SA_RESTART });
	child = fork();
	if (child < 0)
		err(EXIT_FAILURE, "cannot fork");
	if (child == 0)
		handle((struct sigaction){ .sa_handler = SIG_DFL });
	return child;
}

int wait_and_forward(pid_t child)
{
	int status;

	forward_to = child;
	for (;;) {
		if (waitpid(child, &status, WUNTRACED) < 0) {
			if (errno == EINTR)
				continue;
			err(EXIT_FAILURE, "cannot wait for process %d", child);
		}
		if (!WIFSTOPPED(status))
			break;
		raise(SIGSTOP); /* the caller's shell sees a stopped job, and continues both */
		kill(child, SIGCONT);
	}
	forward_to = 0;
	return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
}

int end_as(int status)
{
	if (status > 128) {
		signal(status - 128, SIG_DFL);
		raise(status - 128);
	}
	return status;
}

void fork_and_forward(void)
{
	int alive[2];
	pid_t child;

	if (pipe2(alive, O_CLOEXEC) < 0)
		err(EXIT_FAILURE, "cannot create a pipe");
	child = fork_heard();
	if (child == 0) {
		struct pollfd parent = { .fd = alive[0] };

		/* Ends with its parent, also where that one is killed; maybe it was already. */
		close(alive[1]);
		prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0);
		if (poll(&parent, 1, 0) != 0)
			_exit(EXIT_FAILURE);
		close(alive[0]);
		return;
	}
	/* It stays outside; who is root in the container is not to get there by /proc/PID/root. */
	prctl(PR_SET_DUMPABLE, 0, 0, 0, 0);
	_exit(end_as(wait_and_forward(child)));
}

int open_root(const char *path)
{
	int fd = open(path, O_PATH | O_DIRECTORY | O_CLOEXEC);

	if (fd < 0)
		err(EXIT_FAILURE, "cannot open %s", path);
	if (linux_mount_setattr(-1, "", 0, 0, 0, 0) < 0 && errno == ENOSYS)
		errx(EXIT_FAILURE, "this kernel is too old: Linux " PENROOT_FLOOR " or later is needed");
	return fd;
}

static int resolve_in(int root, const char *path, int flags, uint64_t resolve)
{
	path += strspn(path, "/");
	return linux_openat2(root, *path ? path : ".", (uint64_t)(flags | O_CLOEXEC), 0, RESOLVE_IN_ROOT | resolve);
}

int open_in(int root, const char *path, int flags)
{
	return resolve_in(root, path, flags, 0);
}

/* What proc(5) says of a mount, in the words of its line of /proc/self/mountinfo. */
struct shown {
	char *device, *part, *place, *type;
};

static bool parse_mountinfo(char *line, int *id, struct shown *shown)
{
	char *fields[5] = { 0 }, *tail = strstr(line, " - ");

	if (!tail)
		return false;
	*tail = '\0';
	tail += 3;
	for (size_t i = 0; i < LENGTH(fields); i++)
		if (!(fields[i] = strsep(&line, " ")))
			return false;
	*id = atoi(fields[0]);
	*shown = (struct shown){ fields[2], fields[3], fields[4], strsep(&tail, " ") };
	return true;
}

static int mount_id(int fd)
{
	AUTO_FREE path = text("/proc/self/fdinfo/%d", fd);
	AUTO_CLOSE info = open(path, O_RDONLY | O_CLOEXEC);
	AUTO_FREE all = info < 0 ? NULL : read_all(info, NULL);
	const char *found = all ? strstr(all, "mnt_id:") : NULL;

	if (!found)
		err(EXIT_FAILURE, "cannot read %s", path);
	return atoi(found + strlen("mnt_id:"));
}

static bool is_beneath(const char *path, const char *directory)
{
	size_t n = strcmp(directory, "/") ? strlen(directory) : 0;

	return !strncmp(path, directory, n) && (!path[n] || path[n] == '/');
}

bool is_own(int root, int fd)
{
	int here = mount_id(fd), base = mount_id(root), id;
	AUTO_CLOSE info = open("/proc/self/mountinfo", O_RDONLY | O_CLOEXEC);
	AUTO_FREE all = here == base || info < 0 ? NULL : read_all(info, NULL);
	AUTO_FREE copy = all ? strdup(all) : NULL;
	char *rest = all, *line;
	struct shown shown, mine = { 0 }, roots = { 0 };
	bool own;

	if (here == base)
		return true;
	if (!copy)
		err(EXIT_FAILURE, "cannot read /proc/self/mountinfo");
	while ((line = strsep(&rest, "\n"))) {
		if (!parse_mountinfo(line, &id, &shown))
			continue;
		if (id == here)
			mine = shown;
		if (id == base)
			roots = shown;
	}
	if (!mine.device || !roots.device)
		return false;
	if (!strcmp(mine.device, roots.device)) /* a volume, which shows a part of the container */
		return is_beneath(mine.part, roots.part);
	own = !strcmp(mine.type, "tmpfs");
	for (rest = copy; own && (line = strsep(&rest, "\n"));)
		if (parse_mountinfo(line, &id, &shown) && !strcmp(shown.device, mine.device))
			own = is_beneath(shown.place, roots.place);
	return own;
}

/* No symlink on the way: this is where the user, or the site, had the tree mounted. */
static bool is_named(int root, const char *path)
{
	AUTO_CLOSE fd = resolve_in(root, path, O_PATH, RESOLVE_NO_SYMLINKS);

	return fd >= 0;
}

static bool may_change(int root, const char *path, int fd, enum place place)
{
	if (place == ANYWHERE || is_own(root, fd) || (place == NAMED && is_named(root, path)))
		return true;
	errno = EXDEV;
	return false;
}

static int regular(int fd)
{
	struct stat is;

	if (fd >= 0 && (fstat(fd, &is) < 0 || !S_ISREG(is.st_mode))) {
		close(fd);
		errno = EINVAL;
		return -1;
	}
	return fd;
}

int open_regular(const char *path)
{
	return regular(open(path, O_RDONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC));
}

int open_regular_in(int root, const char *path)
{
	AUTO_CLOSE place = open_in(root, path, O_PATH);
	struct stat is;

	if (place < 0 || fstat(place, &is) < 0 || !may_change(root, path, place, NAMED))
		return -1;
	if (!S_ISREG(is.st_mode)) {
		errno = EINVAL;
		return -1;
	}
	return regular(open_in(root, path, O_RDONLY | O_NONBLOCK | O_NOCTTY));
}

static int create_at(int root, const char *path, mode_t type, mode_t mode, enum place place, int links)
{
	AUTO_FREE trimmed = strdup(path + strspn(path, "/"));
	char target[PATH_MAX];
	char *slash, *name;
	const char *parent_path = ".";
	AUTO_CLOSE parent = -1;
	ssize_t length;
	int fd = open_in(root, path, O_PATH);

	if (fd >= 0 || errno != ENOENT || !trimmed)
		return fd;
	if (links > MAX_SYMLINKS) {
		errno = ELOOP;
		return -1;
	}
	for (size_t n = strlen(trimmed); n && trimmed[n - 1] == '/';)
		trimmed[--n] = '\0';
	slash = strrchr(trimmed, '/');
	name = slash ? slash + 1 : trimmed;
	if (slash) {
		*slash = '\0';
		parent_path = trimmed;
	}
	if (!strcmp(name, "..") || !strcmp(name, ".")) {
		errno = EXDEV; /* beneath a directory that does not exist */
		return -1;
	}
	parent = create_at(root, parent_path, S_IFDIR, 0755, place, links + 1);
	if (parent < 0 || !may_change(root, parent_path, parent, place))
		return -1;
	if ((type == S_IFDIR ? mkdirat(parent, name, mode) : mknodat(parent, name, S_IFREG | mode, 0)) == 0)
		return openat(parent, name, O_PATH | O_NOFOLLOW | O_CLOEXEC);
	if (errno != EEXIST)
		return -1;
	/* A dangling symlink, so what it points to is to be made; or somebody was quicker. */
	length = readlinkat(parent, name, target, sizeof(target) - 1);
	if (length < 0)
		return open_in(root, path, O_PATH);
	target[length] = '\0';
	{
		AUTO_FREE next = *target == '/' ? strdup(target) : text("%s/%s", parent_path, target);

		return next ? create_at(root, next, type, mode, place == NAMED ? OWN : place, links + 1) : -1;
	}
}

int create_in(int root, const char *path, mode_t type, mode_t mode, enum place place)
{
	return create_at(root, path, type, mode, place, 0);
}

/* The value of NAME, NAME- or NAME:-DEFAULT. */
static void put_value(FILE *to, const char *word, size_t length)
{
	AUTO_FREE name = text("%.*s", (int)length, word);
	char *fallback = strstr(name, ":-");
	const char *value;

	if (fallback) {
		*fallback = '\0';
		fallback += 2;
	} else if (length && name[length - 1] == '-') {
		name[length - 1] = '\0';
	}
	value = getenv(name);
	if (value && *value) {
		fputs(value, to);
	} else if (fallback) {
		AUTO_FREE more = substitute(fallback);

		fputs(more, to);
	}
}

char *substitute(const char *from)
{
	static const char of_names[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_";
	char *out = NULL;
	size_t size;
	FILE *to = open_memstream(&out, &size);

	if (!to)
		err(EXIT_FAILURE, "cannot allocate memory");
	for (const char *mark; (mark = strchr(from, '$'));) {
		bool braced = mark[1] == '{';
		const char *name = mark + 1 + braced, *end = braced ? strchr(name, '}') : name + strspn(name, of_names);

		if (!end)
			errx(EXIT_FAILURE, "'${' without '}': %s", mark);
		fwrite(from, 1, (size_t)(mark - from) + (!braced && end == name), to); /* "$" alone stands for itself */
		put_value(to, name, (size_t)(end - name));
		from = end + braced;
	}
	fputs(from, to);
	if (fclose(to) != 0)
		err(EXIT_FAILURE, "cannot allocate memory");
	return out;
}

static bool delete_in(int directory, dev_t device)
{
	CLEANUP(close_dir) DIR *entries = NULL;
	struct dirent *entry;
	int fd = fcntl(directory, F_DUPFD_CLOEXEC, 0);
	bool all = true;

	entries = fd < 0 ? NULL : fdopendir(fd);
	if (!entries) {
		close_fd(&fd);
		return false;
	}
	while ((entry = readdir(entries))) {
		const char *name = entry->d_name;
		struct stat is;
		AUTO_CLOSE inner = -1;

		if (!strcmp(name, ".") || !strcmp(name, ".."))
			continue;
		if (unlinkat(directory, name, 0) == 0)
			continue;
		if (fstatat(directory, name, &is, AT_SYMLINK_NOFOLLOW) < 0 || !S_ISDIR(is.st_mode) || is.st_dev != device) {
			all = false;
			continue;
		}
		/* Images have directories that their owner may not enter, and overlayfs makes one of mode 0. */
		fchmodat(directory, name, 0700, 0);
		inner = openat(directory, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
		if (inner < 0 || !delete_in(inner, device) || unlinkat(directory, name, AT_REMOVEDIR) < 0)
			all = false;
	}
	return all;
}

bool delete_beneath(int directory)
{
	struct stat is;

	return fstat(directory, &is) == 0 && delete_in(directory, is.st_dev);
}

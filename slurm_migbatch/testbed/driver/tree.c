/* Writes the /proc and /dev files that stand beside the state.
 *
 * They are derived: whoever holds the exclusive lock and finds `tree_dirty`
 * makes them again, so a process killed between its change of the state and
 * the files leaves no lasting difference.
 */
#define _GNU_SOURCE
#include "tree.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* Modes that the access files ask for the device nodes. */
#define NODE_ROOT 0400
#define NODE_ALL 0444
/* Root switches DeviceFileModify off by writing to an access file; nothing else here is for writing. */
#define FILE_ACCESS 0644
#define FILE_PLAIN 0444

unsigned cap_minor_gi(unsigned gpu_minor, unsigned gi)
{
	return 3 + 135 * gpu_minor + 9 * gi;
}

unsigned cap_minor_ci(unsigned gpu_minor, unsigned gi, unsigned ci)
{
	return cap_minor_gi(gpu_minor, gi) + 1 + ci;
}

static void join(char path[PATH_MAX], const struct machine *machine, const char *format, ...)
	__attribute__((format(printf, 3, 4)));

static void join(char path[PATH_MAX], const struct machine *machine, const char *format, ...)
{
	int n = snprintf(path, PATH_MAX, "%s/", machine->dir);
	va_list args;

	va_start(args, format);
	vsnprintf(path + n, PATH_MAX - (size_t)n, format, args);
	va_end(args);
}

/* mkdir -p; the mode is set by hand because callers run with umask 077. */
static int make_dirs(char *path)
{
	for (char *p = path + 1;; p++) {
		char end = *p;

		if (end != '/' && end != '\0')
			continue;
		*p = '\0';
		if (mkdir(path, 0755) == 0)
			chmod(path, 0755);
		else if (errno != EEXIST) {
			int error = -errno;

			*p = end;
			return error;
		}
		*p = end;
		if (end == '\0')
			return 0;
	}
}

static int make_parent(const char *path)
{
	char parent[PATH_MAX + 32];
	char *slash;

	snprintf(parent, sizeof(parent), "%s", path);
	slash = strrchr(parent, '/');
	*slash = '\0';
	return make_dirs(parent);
}

/* Written aside and renamed, so that nobody reads half a file. */
static int write_file(const char *path, mode_t mode, const char *text, size_t length)
{
	char aside[PATH_MAX + 32];
	int fd, error;

	error = make_parent(path);
	if (error)
		return error;
	snprintf(aside, sizeof(aside), "%s.new", path);
	fd = open(aside, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
	if (fd < 0)
		return -errno;
	if (write(fd, text, length) != (ssize_t)length || fchmod(fd, mode) || rename(aside, path)) {
		error = -errno;
		close(fd);
		unlink(aside);
		return error;
	}
	close(fd);
	return 0;
}

static int write_access(const char *path, unsigned minor, unsigned mode)
{
	char text[96];
	int n = snprintf(text, sizeof(text), "DeviceFileMinor: %u\nDeviceFileMode: %u\nDeviceFileModify: 1\n", minor, mode);

	return write_file(path, FILE_ACCESS, text, (size_t)n);
}

static int write_minors(const struct machine *machine)
{
	const size_t room = 32 * (2 + MAX_GPUS * MAX_GIS * (1 + MAX_CIS)); /* lines of at most 32 bytes */
	char path[PATH_MAX], *text = malloc(room);
	size_t n = 0;
	int error;

	if (!text)
		return -ENOMEM;
	n += (size_t)snprintf(text + n, room - n, "config 1\nmonitor 2\n");
	for (unsigned g = 0; g < MAX_GPUS; g++)
		for (unsigned i = 0; i < MAX_GIS; i++) {
			n += (size_t)snprintf(text + n, room - n, "gpu%u/gi%u/access %u\n", g, i,
					      cap_minor_gi(g, i));
			for (unsigned j = 0; j < MAX_CIS; j++)
				n += (size_t)snprintf(text + n, room - n, "gpu%u/gi%u/ci%u/access %u\n", g, i,
						      j, cap_minor_ci(g, i, j));
		}
	join(path, machine, "proc/driver/nvidia-caps/mig-minors");
	error = write_file(path, FILE_PLAIN, text, n);
	free(text);
	return error;
}

int tree_create(const struct machine *machine)
{
	static const char *const capabilities = "proc/driver/nvidia/capabilities";
	const struct body *body = machine_body(machine);
	char path[PATH_MAX], text[160];
	int n, error;

	error = write_minors(machine);
	join(path, machine, "%s/mig/config", capabilities);
	if (!error)
		error = write_access(path, 1, NODE_ROOT);
	join(path, machine, "%s/mig/monitor", capabilities);
	if (!error)
		error = write_access(path, 2, NODE_ALL);
	join(path, machine, "proc/devices");
	n = snprintf(text, sizeof(text), "Character devices:\n  1 mem\n195 nvidia\n195 nvidiactl\n%3u nvidia-caps\n\nBlock devices:\n",
		     machine->file->caps_major);
	if (!error)
		error = write_file(path, FILE_PLAIN, text, (size_t)n);
	join(path, machine, "dev/nvidiactl");
	if (!error)
		error = write_file(path, 0666, "", 0);
	for (unsigned g = 0; g < body->gpu_count && !error; g++) {
		const struct gpu *gpu = &body->gpus[g];

		join(path, machine, "dev/nvidia%u", gpu->minor);
		error = write_file(path, 0666, "", 0);
		join(path, machine, "%s/gpu%u/mig", capabilities, gpu->minor);
		if (!error)
			error = make_dirs(path);
	}
	return error;
}

/* Takes `dir`/access away with its directory, also where an earlier caller was killed half-way. */
static int remove_access(const char *dir)
{
	char path[PATH_MAX + 16];

	snprintf(path, sizeof(path), "%s/access.new", dir);
	unlink(path);
	snprintf(path, sizeof(path), "%s/access", dir);
	if (unlink(path) && errno != ENOENT)
		return -errno;
	return rmdir(dir) && errno != ENOENT ? -errno : 0;
}

/* One instance's file: there while the instance lives (or is being made), gone from the start of its destruction. */
static int follow_access(const char *dir, bool wanted, unsigned minor)
{
	char path[PATH_MAX + 16];

	if (!wanted)
		return access(dir, F_OK) ? 0 : remove_access(dir);
	snprintf(path, sizeof(path), "%s/access", dir);
	return access(path, F_OK) ? write_access(path, minor, NODE_ALL) : 0;
}

static int follow_gpu(const struct machine *machine, const struct gpu *gpu)
{
	char dir[PATH_MAX];
	int error = 0;

	for (unsigned i = 0; i < MAX_GIS && !error; i++) {
		const struct gi *gi = &gpu->gi[i];
		bool wanted = gi->serial && gi->gone == 0;

		join(dir, machine, "proc/driver/nvidia/capabilities/gpu%u/mig/gi%u", gpu->minor, i);
		if (!wanted && access(dir, F_OK))
			continue;
		for (unsigned j = 0; j < MAX_CIS && !error; j++) {
			const struct ci *ci = &gi->ci[j];

			join(dir, machine, "proc/driver/nvidia/capabilities/gpu%u/mig/gi%u/ci%u", gpu->minor, i, j);
			error = follow_access(dir, wanted && ci->serial && ci->gone == 0,
					      cap_minor_ci(gpu->minor, i, j));
		}
		join(dir, machine, "proc/driver/nvidia/capabilities/gpu%u/mig/gi%u", gpu->minor, i);
		if (!error)
			error = follow_access(dir, wanted, cap_minor_gi(gpu->minor, i));
	}
	return error;
}

static int write_boot_id(const struct machine *machine)
{
	char path[PATH_MAX], id[UUID_TEXT + 1];

	uuid_text(machine_body(machine)->boot_id, id);
	strcat(id, "\n");
	join(path, machine, "boot_id");
	return write_file(path, FILE_PLAIN, id, strlen(id));
}

int tree_follow(struct machine *machine)
{
	const struct body *body = machine_body(machine);
	uint64_t dirty = atomic_load(&machine->file->tree_dirty);
	int error = 0;

	if (!dirty)
		return 0;
	for (unsigned g = 0; g < body->gpu_count && !error; g++)
		if (dirty & TREE_GPU(g))
			error = follow_gpu(machine, &body->gpus[g]);
	if (!error && (dirty & TREE_BOOT))
		error = write_boot_id(machine);
	if (!error)
		atomic_store(&machine->file->tree_dirty, 0);
	return error;
}

void tree_forget_cap_nodes(const struct machine *machine)
{
	char path[PATH_MAX];
	struct dirent *entry;
	DIR *dir;

	join(path, machine, "dev/nvidia-caps");
	dir = opendir(path);
	if (!dir)
		return;
	while ((entry = readdir(dir)))
		if (strcmp(entry->d_name, ".") && strcmp(entry->d_name, ".."))
			unlinkat(dirfd(dir), entry->d_name, 0);
	closedir(dir);
	rmdir(path);
}

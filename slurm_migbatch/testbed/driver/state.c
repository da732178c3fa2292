/* Mapping, locking and atomic change of the machine file. */
#define _GNU_SOURCE
#include "state.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

static int open_state(const char *dir, int flags)
{
	char path[PATH_MAX];
	int fd;

	snprintf(path, sizeof(path), "%s/state", dir);
	do
		fd = open(path, flags | O_CLOEXEC);
	while (fd < 0 && errno == EINTR);
	return fd < 0 ? -errno : fd;
}

int machine_attach(struct machine *machine, const char *dir)
{
	struct stat status;
	void *map;
	int fd;

	if (strlen(dir) >= sizeof(machine->dir))
		return -ENAMETOOLONG;
	fd = open_state(dir, O_RDWR);
	if (fd < 0)
		return fd;
	if (fstat(fd, &status) || status.st_size != (off_t)sizeof(struct machine_file)) {
		close(fd);
		return -EPROTO;
	}
	map = mmap(NULL, sizeof(struct machine_file), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	close(fd);
	if (map == MAP_FAILED)
		return -errno;
	machine->file = map;
	if (machine->file->magic != MACHINE_MAGIC || machine->file->bytes != sizeof(struct machine_file)) {
		munmap(map, sizeof(struct machine_file));
		machine->file = NULL;
		return -EPROTO;
	}
	strcpy(machine->dir, dir);
	machine->device = status.st_dev;
	machine->inode = status.st_ino;
	machine->lock = -1;
	return 0;
}

void machine_detach(struct machine *machine)
{
	if (machine->file)
		munmap(machine->file, sizeof(struct machine_file));
	machine->file = NULL;
}

/* The file is opened for each critical section: a lock then belongs to this
 * section alone, also in a process that has forked or whose descriptors were
 * closed behind the library's back, and it ends with the process. */
int machine_lock(struct machine *machine, bool exclusive)
{
	struct stat status;
	int fd = open_state(machine->dir, O_RDONLY);

	if (fd < 0)
		return fd;
	if (fstat(fd, &status) || status.st_dev != machine->device || status.st_ino != machine->inode) {
		close(fd); /* another machine was put in its place */
		return -ESTALE;
	}
	while (flock(fd, exclusive ? LOCK_EX : LOCK_SH)) {
		if (errno != EINTR) {
			int error = -errno;

			close(fd);
			return error;
		}
	}
	machine->lock = fd;
	return 0;
}

void machine_unlock(struct machine *machine)
{
	if (machine->lock >= 0)
		close(machine->lock);
	machine->lock = -1;
}

const struct body *machine_body(const struct machine *machine)
{
	uint64_t generation = atomic_load_explicit(&machine->file->generation, memory_order_acquire);

	return &machine->file->body[generation & 1];
}

struct body *machine_shadow(struct machine *machine)
{
	uint64_t generation = atomic_load(&machine->file->generation);
	const struct body *current = &machine->file->body[generation & 1];
	struct body *shadow = &machine->file->body[(generation + 1) & 1];

	memcpy(shadow, current, offsetof(struct body, gpus) + current->gpu_count * sizeof(struct gpu));
	return shadow;
}

void machine_commit(struct machine *machine, uint64_t dirty)
{
	/* in this order: a death after the flip must not hide that the tree is behind */
	atomic_fetch_or(&machine->file->tree_dirty, dirty);
	atomic_fetch_add_explicit(&machine->file->generation, 1, memory_order_release);
}

int64_t now_ns(void)
{
	struct timespec now;

	clock_gettime(CLOCK_BOOTTIME, &now);
	return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

void random_uuid(uint8_t uuid[16], unsigned version)
{
	while (getrandom(uuid, 16, 0) != 16)
		;
	uuid[6] = (uint8_t)((uuid[6] & 0x0F) | (version << 4));
	uuid[8] = (uint8_t)((uuid[8] & 0x3F) | 0x80);
}

void uuid_text(const uint8_t u[16], char text[UUID_TEXT])
{
	snprintf(text, UUID_TEXT, "%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x", u[0], u[1], u[2],
		 u[3], u[4], u[5], u[6], u[7], u[8], u[9], u[10], u[11], u[12], u[13], u[14], u[15]);
}

static int hex(char c)
{
	if (c >= '0' && c <= '9')
		return c - '0';
	if (c >= 'a' && c <= 'f')
		return c - 'a' + 10;
	if (c >= 'A' && c <= 'F')
		return c - 'A' + 10;
	return -1;
}

bool uuid_parse(const char *text, uint8_t uuid[16])
{
	for (unsigned i = 0; i < 16; i++) {
		int high, low;

		if (i == 4 || i == 6 || i == 8 || i == 10)
			if (*text++ != '-')
				return false;
		high = hex(text[0]);
		low = high < 0 ? -1 : hex(text[1]);
		if (low < 0)
			return false;
		uuid[i] = (uint8_t)(high * 16 + low);
		text += 2;
	}
	return *text == '\0';
}

bool gi_takes_place(const struct gi *gi, int64_t now)
{
	return gi->serial && (gi->gone == 0 || gi->gone > now);
}

bool gi_visible(const struct gi *gi, int64_t now)
{
	return gi->serial && gi->gone == 0 && gi->born <= now;
}

bool ci_takes_place(const struct ci *ci, int64_t now)
{
	return ci->serial && (ci->gone == 0 || ci->gone > now);
}

bool ci_visible(const struct ci *ci, int64_t now)
{
	return ci->serial && ci->gone == 0 && ci->born <= now;
}

void gpu_clear(struct gpu *gpu)
{
	memset(gpu->gi, 0, sizeof(gpu->gi));
	memset(&gpu->load, 0, sizeof(gpu->load));
	memset(gpu->gi_loads, 0, sizeof(gpu->gi_loads));
	memset(gpu->ci_loads, 0, sizeof(gpu->ci_loads));
	gpu->locked_graphics = gpu->locked_memory = (struct locked){0, 0};
	gpu->busy_until = 0;
}

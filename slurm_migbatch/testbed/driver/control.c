/* Making, breaking and rebooting a machine. */
#define _GNU_SOURCE
#include "control.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "load.h"
#include "process.h"
#include "tree.h"

static int enter(struct machine *machine, const char *dir)
{
	int error = machine_attach(machine, dir);

	if (error)
		return error;
	error = machine_lock(machine, true);
	if (error)
		machine_detach(machine);
	return error;
}

static int leave(struct machine *machine, int result)
{
	machine_unlock(machine);
	machine_detach(machine);
	return result;
}

/* --- create ------------------------------------------------------------------ */

static int parse_gpus(struct body *body, const char *gpus, int mig)
{
	char key[64], uuid[64];
	unsigned minor;
	int used;

	while (sscanf(gpus, " %63s %u %63s%n", key, &minor, uuid, &used) == 3) {
		const struct model *model = model_by_key(key);
		struct gpu *gpu;

		if (!model || minor >= MAX_GPUS || body->gpu_count >= MAX_GPUS)
			return -EINVAL;
		gpu = &body->gpus[body->gpu_count];
		if (!uuid_parse(uuid, gpu->uuid))
			return -EINVAL;
		gpu->model = (uint8_t)(model - sim_models);
		gpu->minor = (uint8_t)minor;
		gpu->mig_current = gpu->mig_pending = mig != 0;
		body->gpu_count++;
		gpus += used;
	}
	return 0;
}

int migsim_create(const char *dir, const char *gpus, int mig, unsigned caps_major, int ampere_auto_reset)
{
	char path[PATH_MAX], aside[PATH_MAX];
	struct machine_file *file;
	struct machine machine;
	int fd, error;

	if (strlen(dir) >= sizeof(machine.dir))
		return -ENAMETOOLONG;
	snprintf(path, sizeof(path), "%s/state", dir);
	snprintf(aside, sizeof(aside), "%s/state.new", dir);
	if (access(path, F_OK) == 0)
		return -EEXIST;
	fd = open(aside, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
	if (fd < 0)
		return -errno;
	/* users ask NVML too, and their calls are counted: the file is everyone's */
	if (ftruncate(fd, sizeof(*file)) || fchmod(fd, 0666)) {
		error = -errno;
		close(fd);
		return error;
	}
	file = mmap(NULL, sizeof(*file), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	close(fd);
	if (file == MAP_FAILED)
		return -errno;
	file->bytes = sizeof(*file);
	file->caps_major = caps_major;
	file->ampere_auto_reset = ampere_auto_reset != 0;
	file->tree_dirty = TREE_ALL;
	file->body[0].boots = 1;
	file->body[0].next_serial = 1;
	random_uuid(file->body[0].boot_id, 4);
	error = parse_gpus(&file->body[0], gpus, mig);
	file->magic = MACHINE_MAGIC;
	munmap(file, sizeof(*file));
	if (error) {
		unlink(aside);
		return error;
	}
	if (rename(aside, path))
		return -errno;
	error = enter(&machine, dir);
	if (error)
		return error;
	error = tree_create(&machine);
	if (!error)
		error = tree_follow(&machine);
	return leave(&machine, error);
}

/* --- events ------------------------------------------------------------------------ */

#define XID_OFF_THE_BUS 79

static void post(struct machine *machine, unsigned index, uint64_t type, uint64_t data)
{
	uint64_t number = atomic_load(&machine->file->events_posted);

	machine->file->events[number % MAX_EVENTS] = (struct event){.type = type, .data = data, .gpu = index};
	atomic_store_explicit(&machine->file->events_posted, number + 1, memory_order_release);
}

/* --- reboot, reset, loss -------------------------------------------------------- */

int migsim_reboot(const char *dir)
{
	struct machine machine;
	struct body *body;
	int error = enter(&machine, dir);

	if (error)
		return error;
	body = machine_shadow(&machine);
	body->boots++;
	random_uuid(body->boot_id, 4);
	memset(body->processes, 0, sizeof(body->processes));
	for (unsigned g = 0; g < body->gpu_count; g++) {
		struct gpu *gpu = &body->gpus[g];

		gpu_clear(gpu);
		gpu->lost = 0;
		gpu->app_graphics_mhz = gpu->app_memory_mhz = 0;
		if (gpu_model(gpu)->arch == NVML_DEVICE_ARCH_AMPERE)
			gpu->mig_current = gpu->mig_pending; /* the InfoROM keeps it */
		else
			gpu->mig_current = gpu->mig_pending = 0;
	}
	machine_commit(&machine, TREE_ALL);
	tree_forget_cap_nodes(&machine);
	return leave(&machine, tree_follow(&machine));
}

int migsim_reset_gpu(const char *dir, unsigned index)
{
	struct machine machine;
	struct gpu *gpu;
	int error = enter(&machine, dir);

	if (error)
		return error;
	if (index >= machine_body(&machine)->gpu_count)
		return leave(&machine, -ENODEV);
	if (process_on_gpu(machine_body(&machine), index))
		return leave(&machine, -EBUSY);
	gpu = &machine_shadow(&machine)->gpus[index];
	gpu_clear(gpu);
	gpu->lost = 0;
	gpu->mig_current = gpu->mig_pending;
	machine_commit(&machine, TREE_GPU(index));
	return leave(&machine, tree_follow(&machine));
}

int migsim_set_lost(const char *dir, unsigned index, int lost)
{
	struct machine machine;
	int error = enter(&machine, dir);

	if (error)
		return error;
	if (index >= machine_body(&machine)->gpu_count)
		return leave(&machine, -ENODEV);
	machine_shadow(&machine)->gpus[index].lost = lost != 0;
	machine_commit(&machine, 0);
	if (lost)
		post(&machine, index, NVML_EVENT_XID, XID_OFF_THE_BUS);
	return leave(&machine, 0);
}

int migsim_set_variants(const char *dir, unsigned variants)
{
	struct machine machine;
	int error;

	if (variants & ~(unsigned)VARIANT_ALL)
		return -EINVAL;
	error = enter(&machine, dir);
	if (error)
		return error;
	atomic_store(&machine.file->variants, variants);
	return leave(&machine, 0);
}

/* --- latency and faults ----------------------------------------------------------- */

int migsim_set_latency(const char *dir, unsigned op, unsigned base_us, unsigned span_us)
{
	struct machine machine;
	int error = op < OP_COUNT ? enter(&machine, dir) : -EINVAL;

	if (error)
		return error;
	machine.file->latency[op] = (struct latency){base_us, span_us};
	return leave(&machine, 0);
}

int migsim_fail(const char *dir, const char *function, int code, uint64_t nth, uint64_t times, unsigned moment, int kill)
{
	int number = function_by_name(function);
	struct machine machine;
	int error;

	if (number < 0)
		return -ENOENT;
	if (moment > FAULT_AFTER || nth < 1)
		return -EINVAL;
	error = enter(&machine, dir);
	if (error)
		return error;
	for (unsigned i = 0; i < MAX_FAULTS; i++) {
		struct fault *fault = &machine.file->faults[i];

		if (atomic_load(&fault->armed))
			continue;
		fault->function = (uint32_t)number;
		fault->moment = moment;
		fault->kill = kill != 0;
		fault->code = code;
		fault->nth = nth;
		fault->times = times;
		atomic_store(&fault->hits, 0);
		atomic_store(&fault->armed, 1); /* last: callers look at it without the lock */
		return leave(&machine, 0);
	}
	return leave(&machine, -ENOSPC);
}

static int64_t later(int64_t ns)
{
	return ns == INT64_MAX ? INT64_MAX : ns > 0 ? now_ns() + ns : 0;
}

int migsim_stick(const char *dir, int64_t gi_ns, int64_t ci_ns)
{
	struct machine machine;
	int error = enter(&machine, dir);

	if (error)
		return error;
	atomic_store(&machine.file->gi_stuck_until, later(gi_ns));
	atomic_store(&machine.file->ci_stuck_until, later(ci_ns));
	return leave(&machine, 0);
}

int migsim_reset_faults(const char *dir)
{
	struct machine machine;
	int error = enter(&machine, dir);

	if (error)
		return error;
	for (unsigned i = 0; i < MAX_FAULTS; i++)
		atomic_store(&machine.file->faults[i].armed, 0);
	atomic_store(&machine.file->gi_stuck_until, 0);
	atomic_store(&machine.file->ci_stuck_until, 0);
	return leave(&machine, 0);
}

/* --- processes --------------------------------------------------------------------- */

/* Finds the compute instance or whole GPU that a UUID names. */
static int find_device(const struct body *body, const char *text, uint8_t *index, uint64_t *ci_serial)
{
	bool mig = !strncmp(text, "MIG-", 4);
	int64_t now = now_ns();
	uint8_t uuid[16];

	if ((!mig && strncmp(text, "GPU-", 4)) || !uuid_parse(text + 4, uuid))
		return -EINVAL;
	for (unsigned g = 0; g < body->gpu_count; g++) {
		const struct gpu *gpu = &body->gpus[g];

		*index = (uint8_t)g;
		*ci_serial = 0;
		if (!mig && !memcmp(gpu->uuid, uuid, 16)) /* CUDA sees no whole GPU while it is partitioned */
			return gpu->mig_current ? -EBUSY : 0;
		for (unsigned i = 0; i < MAX_GIS && mig; i++)
			for (unsigned j = 0; j < MAX_CIS && gi_visible(&gpu->gi[i], now); j++)
				if (ci_visible(&gpu->gi[i].ci[j], now) && !memcmp(gpu->gi[i].ci[j].uuid, uuid, 16)) {
					*ci_serial = gpu->gi[i].ci[j].serial;
					return 0;
				}
	}
	return -ENODEV;
}

int migsim_start_process(const char *dir, const char *uuid, int pid, uint64_t memory_mib, int sticky)
{
	struct process process = {.pid = pid, .memory_mib = memory_mib};
	struct machine machine;
	struct body *body;
	bool alive;
	int error;

	if (pid <= 0)
		return -EINVAL;
	error = enter(&machine, dir);
	if (error)
		return error;
	error = find_device(machine_body(&machine), uuid, &process.gpu, &process.ci_serial);
	if (error)
		return leave(&machine, error);
	process.start_time = process_start_time(pid, &alive);
	process.sticky = sticky < 0 ? !alive : sticky > 0;
	body = machine_shadow(&machine);
	process_sweep(body);
	for (unsigned i = 0; i < MAX_PROCESSES; i++)
		if (!body->processes[i].pid) {
			body->processes[i] = process;
			machine_commit(&machine, 0);
			return leave(&machine, 0);
		}
	return leave(&machine, -ENOSPC);
}

int migsim_end_process(const char *dir, int pid)
{
	struct machine machine;
	struct body *body;
	int ended = 0, error = enter(&machine, dir);

	if (error)
		return error;
	body = machine_shadow(&machine);
	for (unsigned i = 0; i < MAX_PROCESSES; i++)
		if (body->processes[i].pid == pid && pid) {
			memset(&body->processes[i], 0, sizeof(body->processes[i]));
			ended++;
		}
	machine_commit(&machine, 0);
	return leave(&machine, ended);
}

/* --- load and events --------------------------------------------------------------- */

unsigned migsim_load_count(void)
{
	return LOAD_COUNT;
}

const char *migsim_load_name(unsigned number)
{
	return number < LOAD_COUNT ? load_names[number] : "";
}

int migsim_load_is_share(unsigned number)
{
	return number < LOAD_COUNT && load_units[number] != TRAFFIC;
}

int migsim_set_load(const char *dir, const char *uuid, const uint32_t *rates)
{
	struct machine machine;
	uint64_t ci_serial;
	struct gpu *gpu;
	uint8_t index;
	int error;

	for (unsigned kind = 0; kind < LOAD_COUNT; kind++)
		if (load_units[kind] != TRAFFIC && rates[kind] > LOAD_FULL)
			return -EINVAL;
	error = enter(&machine, dir);
	if (error)
		return error;
	error = find_device(machine_body(&machine), uuid, &index, &ci_serial);
	if (error)
		return leave(&machine, error);
	gpu = &machine_shadow(&machine)->gpus[index];
	if (ci_serial)
		load_set_ci(gpu, ci_serial, rates, now_ns());
	else
		load_set_gpu(gpu, rates, now_ns());
	machine_commit(&machine, 0);
	return leave(&machine, 0);
}

int migsim_post_event(const char *dir, unsigned index, uint64_t type, uint64_t data)
{
	struct machine machine;
	int error = enter(&machine, dir);

	if (error)
		return error;
	if (index >= machine_body(&machine)->gpu_count)
		return leave(&machine, -ENODEV);
	post(&machine, index, type, data);
	return leave(&machine, 0);
}

/* --- counters ------------------------------------------------------------------------ */

unsigned migsim_function_count(void)
{
	return FN_COUNT;
}

const char *migsim_function_name(unsigned number)
{
	return number < FN_COUNT ? function_names[number] : "";
}

int migsim_calls(const char *dir, uint64_t *counts, int reset)
{
	struct machine machine;
	int error = enter(&machine, dir);

	if (error)
		return error;
	for (unsigned i = 0; i < FN_COUNT; i++)
		counts[i] = reset ? atomic_exchange(&machine.file->calls[i], 0) : atomic_load(&machine.file->calls[i]);
	return leave(&machine, 0);
}

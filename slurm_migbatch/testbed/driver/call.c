/* The frame around every call, and the handles. */
#define _GNU_SOURCE
#include "call.h"

#include <errno.h>
#include <signal.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "session.h"
#include "tree.h"

/* Counts the call and finds the fault that is due in it, if any. */
static struct fault *fault_due(struct machine_file *file, enum function function)
{
	struct fault *due = NULL;

	for (unsigned i = 0; i < MAX_FAULTS; i++) {
		struct fault *fault = &file->faults[i];
		uint64_t hit;

		if (!atomic_load(&fault->armed) || fault->function != (uint32_t)function)
			continue;
		hit = atomic_fetch_add(&fault->hits, 1) + 1;
		if (!due && hit >= fault->nth && hit - fault->nth < fault->times)
			due = fault;
	}
	return due;
}

static nvmlReturn_t strike(const struct fault *fault)
{
	if (fault->kill)
		kill(getpid(), SIGKILL);
	return (nvmlReturn_t)fault->code;
}

nvmlReturn_t call_enter(struct call *call, enum function function, enum access access)
{
	struct fault *fault;
	bool repair;

	memset(call, 0, sizeof(*call));
	call->function = function;
	call->access = access;
	call->machine = session_enter();
	if (!call->machine)
		return NVML_ERROR_UNINITIALIZED;
	atomic_fetch_add(&call->machine->file->calls[function], 1);
	fault = fault_due(call->machine->file, function);
	if (fault && fault->moment == FAULT_BEFORE)
		return strike(fault);
	call->late = fault;
	/* a killed caller may have left the files behind the state: root repairs them */
	repair = atomic_load(&call->machine->file->tree_dirty) && !geteuid();
	if (machine_lock(call->machine, access == WRITE || repair))
		return NVML_ERROR_DRIVER_NOT_LOADED;
	call->locked = true;
	call->body = machine_body(call->machine);
	if (!session_current(call->body))
		return NVML_ERROR_DRIVER_NOT_LOADED;
	if (repair)
		tree_follow(call->machine);
	call->now = now_ns();
	return NVML_SUCCESS;
}

static void sleep_until(int64_t moment)
{
	struct timespec until = {.tv_sec = moment / 1000000000, .tv_nsec = moment % 1000000000};

	/* the kernel does not let go of what it has begun, signal or not */
	while (clock_nanosleep(CLOCK_BOOTTIME, TIMER_ABSTIME, &until, NULL) == EINTR)
		;
}

nvmlReturn_t call_leave(struct call *call, nvmlReturn_t result)
{
	if (!call->machine)
		return result;
	if (call->shadow && result == NVML_SUCCESS && call->late && call->late->moment == FAULT_WRITING) {
		result = strike(call->late);
		call->ready = 0;
	} else if (call->shadow && result == NVML_SUCCESS) {
		machine_commit(call->machine, call->dirty);
		if (call->late && call->late->moment == FAULT_DURING)
			result = strike(call->late);
		tree_follow(call->machine);
	}
	if (call->late && call->late->moment == FAULT_AFTER)
		result = strike(call->late);
	if (call->locked)
		machine_unlock(call->machine);
	session_leave();
	if (call->ready > call->now)
		sleep_until(call->ready);
	return result;
}

struct body *call_write(struct call *call)
{
	if (!call->shadow)
		call->shadow = machine_shadow(call->machine);
	return call->shadow;
}

int64_t call_book(struct call *call, struct gpu *gpu, enum latency_op op, unsigned size, unsigned of)
{
	const struct latency *latency = &call->machine->file->latency[op];
	int64_t took = latency->base_us;

	if (of > 1)
		took += (int64_t)latency->span_us * (size - 1) / (of - 1);
	if (took == 0 && gpu->busy_until <= call->now)
		return call->now;
	call->ready = (gpu->busy_until > call->now ? gpu->busy_until : call->now) + took * 1000;
	gpu->busy_until = call->ready;
	return call->ready;
}

/* Handles: kind 4 bits, gpu 6, gi 4, ci 4, serial 46. */
enum kind { KIND_GPU = 1, KIND_MIG = 2, KIND_GI = 3, KIND_CI = 4 };
#define SERIAL_MASK ((UINT64_C(1) << 46) - 1)

static struct sim_opaque *encode(enum kind kind, unsigned gpu, unsigned gi, unsigned ci, uint64_t serial)
{
	uint64_t value = (uint64_t)kind << 60 | (uint64_t)gpu << 54 | (uint64_t)gi << 50 | (uint64_t)ci << 46 |
			 (serial & SERIAL_MASK);

	return (struct sim_opaque *)(uintptr_t)value;
}

nvmlDevice_t handle_gpu(const struct call *call, unsigned index)
{
	return encode(KIND_GPU, index, 0, 0, call->body->boots);
}

nvmlDevice_t handle_mig(unsigned index, unsigned gi_id, unsigned ci_id, const struct ci *ci)
{
	return encode(KIND_MIG, index, gi_id, ci_id, ci->serial);
}

nvmlGpuInstance_t handle_gi(unsigned index, unsigned gi_id, const struct gi *gi)
{
	return encode(KIND_GI, index, gi_id, 0, gi->serial);
}

nvmlComputeInstance_t handle_ci(unsigned index, unsigned gi_id, unsigned ci_id, const struct ci *ci)
{
	return encode(KIND_CI, index, gi_id, ci_id, ci->serial);
}

static nvmlReturn_t decode(const struct call *call, const struct sim_opaque *handle, enum kind *kind,
			   struct target *target)
{
	uint64_t value = (uint64_t)(uintptr_t)handle, serial = value & SERIAL_MASK;

	memset(target, 0, sizeof(*target));
	*kind = (enum kind)(value >> 60);
	target->index = (value >> 54) & 63;
	target->gi_id = (value >> 50) & 15;
	target->ci_id = (value >> 46) & 15;
	if (*kind < KIND_GPU || *kind > KIND_CI || target->index >= call->body->gpu_count)
		return NVML_ERROR_INVALID_ARGUMENT;
	target->gpu = &call->body->gpus[target->index];
	if (*kind == KIND_GPU) {
		if (serial != (call->body->boots & SERIAL_MASK))
			return NVML_ERROR_INVALID_ARGUMENT;
		return target->gpu->lost ? NVML_ERROR_GPU_IS_LOST : NVML_SUCCESS;
	}
	if (target->gi_id >= MAX_GIS || target->ci_id >= MAX_CIS)
		return NVML_ERROR_INVALID_ARGUMENT;
	target->gi = &target->gpu->gi[target->gi_id];
	if (!gi_visible(target->gi, call->now))
		return NVML_ERROR_INVALID_ARGUMENT;
	if (*kind == KIND_GI) {
		if (serial != (target->gi->serial & SERIAL_MASK))
			return NVML_ERROR_INVALID_ARGUMENT;
	} else {
		target->ci = &target->gi->ci[target->ci_id];
		if (!ci_visible(target->ci, call->now) || serial != (target->ci->serial & SERIAL_MASK))
			return NVML_ERROR_INVALID_ARGUMENT;
	}
	return target->gpu->lost ? NVML_ERROR_GPU_IS_LOST : NVML_SUCCESS;
}

nvmlReturn_t resolve_device(const struct call *call, nvmlDevice_t device, struct target *target)
{
	enum kind kind;

	TRY(decode(call, device, &kind, target));
	return kind == KIND_GPU || kind == KIND_MIG ? NVML_SUCCESS : NVML_ERROR_INVALID_ARGUMENT;
}

nvmlReturn_t resolve_gpu(const struct call *call, nvmlDevice_t device, struct target *target)
{
	TRY(resolve_device(call, device, target));
	return target->ci ? NVML_ERROR_NOT_SUPPORTED : NVML_SUCCESS;
}

nvmlReturn_t resolve_device_for(const struct call *call, nvmlDevice_t device, const void *out, struct target *target)
{
	TRY(resolve_device(call, device, target));
	return out ? NVML_SUCCESS : NVML_ERROR_INVALID_ARGUMENT;
}

nvmlReturn_t resolve_gpu_for(const struct call *call, nvmlDevice_t device, const void *out, struct target *target)
{
	TRY(resolve_gpu(call, device, target));
	return out ? NVML_SUCCESS : NVML_ERROR_INVALID_ARGUMENT;
}

nvmlReturn_t resolve_gi(const struct call *call, nvmlGpuInstance_t instance, struct target *target)
{
	enum kind kind;

	TRY(decode(call, instance, &kind, target));
	return kind == KIND_GI ? NVML_SUCCESS : NVML_ERROR_INVALID_ARGUMENT;
}

nvmlReturn_t resolve_ci(const struct call *call, nvmlComputeInstance_t instance, struct target *target)
{
	enum kind kind;

	TRY(decode(call, instance, &kind, target));
	return kind == KIND_CI ? NVML_SUCCESS : NVML_ERROR_INVALID_ARGUMENT;
}

bool has_variant(const struct call *call, enum variant variant)
{
	return atomic_load(&call->machine->file->variants) & variant;
}

nvmlReturn_t require_root(void)
{
	return geteuid() == 0 ? NVML_SUCCESS : NVML_ERROR_NO_PERMISSION;
}

nvmlReturn_t give_number(const struct call *call, nvmlDevice_t device, unsigned *out, unsigned number)
{
	struct target t;

	TRY(resolve_gpu_for(call, device, out, &t));
	*out = number;
	return NVML_SUCCESS;
}

nvmlReturn_t give_text(char *out, unsigned length, const char *text)
{
	if (!out)
		return NVML_ERROR_INVALID_ARGUMENT;
	if (strlen(text) >= length)
		return NVML_ERROR_INSUFFICIENT_SIZE;
	strcpy(out, text);
	return NVML_SUCCESS;
}

/* MIG mode and MIG devices. */
#include "mig.h"

#include <string.h>

#include "api.h"
#include "load.h"
#include "process.h"

nvmlReturn_t require_mig(const struct gpu *gpu)
{
	return gpu->mig_current ? NVML_SUCCESS : NVML_ERROR_NOT_SUPPORTED;
}

struct ci_profile ci_target_profile(const struct target *t)
{
	struct ci_profile profile = {0};

	ci_profile_get(gpu_model(t->gpu), gi_profile(t->gpu, t->gi), t->ci->profile, &profile);
	return profile;
}

void ci_name(const struct target *t, char *text, unsigned length)
{
	struct ci_profile compute = ci_target_profile(t);

	ci_profile_name(gi_profile(t->gpu, t->gi), &compute, text, length);
}

nvmlReturn_t mig_mode(struct call *call, nvmlDevice_t device, unsigned *current, unsigned *pending)
{
	struct target t;

	TRY(resolve_device_for(call, device, pending ? current : NULL, &t));
	*current = t.gpu->mig_current;
	*pending = t.gpu->mig_pending;
	return NVML_SUCCESS;
}

static bool has_instances(const struct gpu *gpu, int64_t now)
{
	for (unsigned i = 0; i < MAX_GIS; i++)
		if (gi_takes_place(&gpu->gi[i], now))
			return true;
	return false;
}

/* Ampere keeps the wish in the InfoROM until the GPU is reset; later architectures switch at once. */
nvmlReturn_t mig_set_mode(struct call *call, nvmlDevice_t device, unsigned mode, nvmlReturn_t *activation)
{
	struct target t;
	struct gpu *gpu;
	bool in_use, reset;

	TRY(resolve_gpu(call, device, &t));
	if (!activation || mode > 1)
		return NVML_ERROR_INVALID_ARGUMENT;
	TRY(require_root());
	*activation = NVML_SUCCESS;
	if (mode == t.gpu->mig_current && mode == t.gpu->mig_pending)
		return NVML_SUCCESS;
	if (mode != t.gpu->mig_current && has_instances(t.gpu, call->now)) {
		*activation = NVML_ERROR_IN_USE;
		return NVML_ERROR_IN_USE;
	}
	in_use = process_on_gpu(call->body, t.index);
	reset = gpu_model(t.gpu)->arch == NVML_DEVICE_ARCH_AMPERE && !call->machine->file->ampere_auto_reset;
	if (in_use && gpu_model(t.gpu)->arch != NVML_DEVICE_ARCH_AMPERE) {
		*activation = NVML_ERROR_IN_USE;
		return NVML_ERROR_IN_USE;
	}
	gpu = &call_write(call)->gpus[t.index];
	gpu->mig_pending = (uint8_t)mode;
	if (mode == gpu->mig_current)
		return NVML_SUCCESS; /* took back a change that was pending */
	if (in_use)
		*activation = NVML_ERROR_IN_USE;
	else if (reset)
		*activation = NVML_ERROR_RESET_REQUIRED;
	else {
		gpu->mig_current = (uint8_t)mode;
		load_set_gpu(gpu, (const uint32_t[LOAD_COUNT]){0}, call->now);
		call_book(call, gpu, OP_SET_MODE, 1, 1);
	}
	return NVML_SUCCESS;
}

nvmlReturn_t mig_is_handle(struct call *call, nvmlDevice_t device, unsigned *is_mig)
{
	struct target t;

	TRY(resolve_device_for(call, device, is_mig, &t));
	*is_mig = t.ci != NULL;
	return NVML_SUCCESS;
}

nvmlReturn_t mig_max_count(struct call *call, nvmlDevice_t device, unsigned *count)
{
	struct target t;

	TRY(resolve_gpu_for(call, device, count, &t));
	*count = t.gpu->mig_current ? gpu_model(t.gpu)->compute_slices : 0;
	return NVML_SUCCESS;
}

/* The index-th MIG device of a GPU, or the number of those before (gi_id, ci_id) where `before` is given. */
static bool walk(const struct call *call, const struct gpu *gpu, const struct target *before, unsigned index,
		 unsigned *gi_id, unsigned *ci_id, unsigned *seen)
{
	*seen = 0;
	for (unsigned i = 0; i < MAX_GIS; i++)
		for (unsigned j = 0; j < MAX_CIS && gi_visible(&gpu->gi[i], call->now); j++) {
			if (!ci_visible(&gpu->gi[i].ci[j], call->now))
				continue;
			if (before ? i == before->gi_id && j == before->ci_id : *seen == index) {
				*gi_id = i;
				*ci_id = j;
				return true;
			}
			++*seen;
		}
	return false;
}

unsigned mig_index(const struct call *call, const struct target *t)
{
	unsigned gi_id, ci_id, seen;

	walk(call, t->gpu, t, 0, &gi_id, &ci_id, &seen);
	return seen;
}

nvmlReturn_t mig_by_index(struct call *call, nvmlDevice_t device, unsigned index, nvmlDevice_t *out)
{
	unsigned gi_id, ci_id, seen;
	struct target t;

	TRY(resolve_gpu(call, device, &t));
	/* with MIG off no index is refused (recorded, see tests/support/recorded) */
	if (!out || (t.gpu->mig_current && index >= gpu_model(t.gpu)->compute_slices))
		return NVML_ERROR_INVALID_ARGUMENT;
	if (!walk(call, t.gpu, NULL, index, &gi_id, &ci_id, &seen))
		return NVML_ERROR_NOT_FOUND;
	*out = handle_mig(t.index, gi_id, ci_id, &t.gpu->gi[gi_id].ci[ci_id]);
	return NVML_SUCCESS;
}

/* For calls that take a MIG device only. That they refuse a GPU as an invalid argument is recorded with MIG off. */
static nvmlReturn_t resolve_mig_for(struct call *call, nvmlDevice_t device, const void *out, struct target *t)
{
	TRY(resolve_device(call, device, t));
	if (!t->ci)
		return t->gpu->mig_current ? NVML_ERROR_NOT_SUPPORTED : NVML_ERROR_INVALID_ARGUMENT;
	return out ? NVML_SUCCESS : NVML_ERROR_INVALID_ARGUMENT;
}

nvmlReturn_t mig_parent(struct call *call, nvmlDevice_t device, nvmlDevice_t *out)
{
	struct target t;

	TRY(resolve_mig_for(call, device, out, &t));
	*out = handle_gpu(call, t.index);
	return NVML_SUCCESS;
}

nvmlReturn_t mig_gi_id(struct call *call, nvmlDevice_t device, unsigned *id)
{
	struct target t;

	TRY(resolve_mig_for(call, device, id, &t));
	*id = t.gi_id;
	return NVML_SUCCESS;
}

nvmlReturn_t mig_ci_id(struct call *call, nvmlDevice_t device, unsigned *id)
{
	struct target t;

	TRY(resolve_mig_for(call, device, id, &t));
	*id = t.ci_id;
	return NVML_SUCCESS;
}

nvmlReturn_t mig_attributes(struct call *call, nvmlDevice_t device, nvmlDeviceAttributes_t *out)
{
	const struct profile *profile;
	struct ci_profile compute;
	struct target t;

	TRY(resolve_device(call, device, &t));
	if (!t.ci)
		return NVML_ERROR_NOT_SUPPORTED;
	if (!out)
		return NVML_ERROR_INVALID_ARGUMENT;
	profile = gi_profile(t.gpu, t.gi);
	compute = ci_target_profile(&t);
	memset(out, 0, sizeof(*out));
	out->multiprocessorCount = compute.sm;
	out->sharedCopyEngineCount = profile->ce;
	out->sharedDecoderCount = profile->dec;
	out->sharedEncoderCount = profile->enc;
	out->sharedJpegCount = profile->jpeg;
	out->sharedOfaCount = profile->ofa;
	out->gpuInstanceSliceCount = profile->g;
	out->computeInstanceSliceCount = compute.slices;
	out->memorySizeMB = profile->memory_mb;
	return NVML_SUCCESS;
}

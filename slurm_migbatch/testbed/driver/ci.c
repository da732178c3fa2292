/* Compute instances: profiles, placements, capacity, life-cycle. */
#include <stdio.h>
#include <string.h>

#include "api.h"
#include "load.h"
#include "mig.h"
#include "process.h"

/* --- profiles -------------------------------------------------------------- */

/* INVALID_ARGUMENT for numbers outside the enums, NOT_SUPPORTED for profiles this GPU instance does not have. */
static nvmlReturn_t find_profile(const struct call *call, const struct target *t, unsigned enum_id,
				 struct ci_profile *profile)
{
	if (enum_id >= NVML_COMPUTE_INSTANCE_PROFILE_COUNT)
		return NVML_ERROR_INVALID_ARGUMENT;
	if (enum_id == CI_7_SLICE_NVL && !has_variant(call, VARIANT_NVL))
		return NVML_ERROR_NOT_SUPPORTED;
	return ci_profile_get(gpu_model(t->gpu), gi_profile(t->gpu, t->gi), enum_id, profile) ? NVML_SUCCESS :
											      NVML_ERROR_NOT_SUPPORTED;
}

/* The profile id of an enum and, as it undoes itself, the enum of an id. */
static unsigned profile_id(const struct call *call, unsigned number)
{
	if (!has_variant(call, VARIANT_NVL_SWAPPED))
		return number;
	return number == CI_7_SLICE ? CI_7_SLICE_NVL : number == CI_7_SLICE_NVL ? CI_7_SLICE : number;
}

/* The same by profile id, where anything unknown is an invalid argument. */
static nvmlReturn_t find_id(const struct call *call, const struct target *t, unsigned id, struct ci_profile *profile)
{
	return find_profile(call, t, profile_id(call, id), profile) == NVML_SUCCESS ? NVML_SUCCESS :
										      NVML_ERROR_INVALID_ARGUMENT;
}

nvmlReturn_t ci_profile_info(struct call *call, nvmlGpuInstance_t instance, unsigned profile_enum, unsigned engine,
			     nvmlComputeInstanceProfileInfo_v1_t *info)
{
	const struct profile *parent;
	struct ci_profile profile;
	struct target t;

	TRY(resolve_gi(call, instance, &t));
	if (!info || engine >= NVML_COMPUTE_INSTANCE_ENGINE_PROFILE_COUNT)
		return NVML_ERROR_INVALID_ARGUMENT;
	TRY(find_profile(call, &t, profile_enum, &profile));
	parent = gi_profile(t.gpu, t.gi);
	*info = (nvmlComputeInstanceProfileInfo_v1_t){
		.id = profile_id(call, profile.enum_id),
		.sliceCount = profile.slices,
		.instanceCount = profile.max,
		.multiprocessorCount = profile.sm,
		.sharedCopyEngineCount = parent->ce,
		.sharedDecoderCount = parent->dec,
		.sharedEncoderCount = parent->enc,
		.sharedJpegCount = parent->jpeg,
		.sharedOfaCount = parent->ofa,
	};
	return NVML_SUCCESS;
}

nvmlReturn_t ci_profile_info_v(struct call *call, nvmlGpuInstance_t instance, unsigned profile_enum, unsigned engine,
			       void *info)
{
	const struct profile *parent;
	struct ci_profile profile;
	nvmlComputeInstanceProfileInfo_v3_t *v3 = info;
	unsigned version;
	char name[48];
	struct target t;

	TRY(resolve_gi(call, instance, &t));
	if (!info || engine >= NVML_COMPUTE_INSTANCE_ENGINE_PROFILE_COUNT)
		return NVML_ERROR_INVALID_ARGUMENT;
	version = *(const unsigned *)info;
	if (version != NVML_VERSION_WORD(nvmlComputeInstanceProfileInfo_v2_t, 2) &&
	    version != NVML_VERSION_WORD(nvmlComputeInstanceProfileInfo_v3_t, 3))
		return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
	TRY(find_profile(call, &t, profile_enum, &profile));
	parent = gi_profile(t.gpu, t.gi);
	/* v3 is v2 with the capabilities behind it */
	v3->id = profile_id(call, profile.enum_id);
	v3->sliceCount = profile.slices;
	v3->instanceCount = profile.max;
	v3->multiprocessorCount = profile.sm;
	v3->sharedCopyEngineCount = parent->ce;
	v3->sharedDecoderCount = parent->dec;
	v3->sharedEncoderCount = parent->enc;
	v3->sharedJpegCount = parent->jpeg;
	v3->sharedOfaCount = parent->ofa;
	ci_profile_name(parent, &profile, name, sizeof(name));
	memset(v3->name, 0, sizeof(v3->name));
	snprintf(v3->name, sizeof(v3->name), "MIG %s", name);
	if (version == NVML_VERSION_WORD(nvmlComputeInstanceProfileInfo_v3_t, 3))
		v3->capabilities = parent->gfx ? NVML_COMPUTE_INSTANCE_PROFILE_CAPS_GFX : 0;
	return NVML_SUCCESS;
}

nvmlReturn_t ci_placements(struct call *call, nvmlGpuInstance_t instance, unsigned id, nvmlPlacement_t *placements,
			   unsigned *count)
{
	struct ci_profile profile;
	struct target t;

	TRY(resolve_gi(call, instance, &t));
	if (!count)
		return NVML_ERROR_INVALID_ARGUMENT;
	TRY(require_root());
	TRY(find_id(call, &t, id, &profile));
	if (placements && *count < profile.start_count) {
		*count = profile.start_count;
		return NVML_ERROR_INSUFFICIENT_SIZE;
	}
	*count = profile.start_count;
	for (unsigned i = 0; placements && i < profile.start_count; i++)
		placements[i] = (nvmlPlacement_t){profile.starts[i], profile.size};
	return NVML_SUCCESS;
}

/* --- what is left of a GPU instance ------------------------------------------ */

static bool place_free(const struct gi *gi, unsigned start, unsigned size, int64_t now)
{
	for (unsigned j = 0; j < MAX_CIS; j++) {
		const struct ci *ci = &gi->ci[j];

		if (ci_takes_place(ci, now) && start < ci->start + ci->size && ci->start < start + size)
			return false;
	}
	return true;
}

/* How many more of a compute profile the slices and the multiprocessors of the GPU instance allow. */
static unsigned headroom(const struct target *t, const struct ci_profile *profile, int64_t now)
{
	const struct profile *parent = gi_profile(t->gpu, t->gi);
	unsigned slices = parent->g, sms = parent->sm, by_slices, by_sms;

	for (unsigned j = 0; j < MAX_CIS; j++) {
		struct ci_profile other;

		if (!ci_takes_place(&t->gi->ci[j], now) ||
		    !ci_profile_get(gpu_model(t->gpu), parent, t->gi->ci[j].profile, &other))
			continue;
		slices -= other.slices;
		sms -= other.sm;
	}
	by_slices = slices / profile->slices;
	by_sms = sms / profile->sm;
	return by_slices < by_sms ? by_slices : by_sms;
}

nvmlReturn_t ci_capacity(struct call *call, nvmlGpuInstance_t instance, unsigned id, unsigned *count)
{
	struct ci_profile profile;
	unsigned places = 0, room;
	struct target t;

	TRY(resolve_gi(call, instance, &t));
	if (!count)
		return NVML_ERROR_INVALID_ARGUMENT;
	TRY(require_root());
	TRY(find_id(call, &t, id, &profile));
	for (unsigned i = 0; i < profile.start_count; i++)
		places += place_free(t.gi, profile.starts[i], profile.size, call->now);
	room = headroom(&t, &profile, call->now);
	*count = places < room ? places : room;
	return NVML_SUCCESS;
}

/* --- life-cycle ------------------------------------------------------------- */

static nvmlReturn_t create(struct call *call, nvmlGpuInstance_t instance, unsigned id,
			   const nvmlPlacement_t *placement, nvmlComputeInstance_t *out)
{
	struct ci_profile profile;
	int start = -1;
	unsigned ci_id = 0;
	struct target t;
	struct body *body;
	struct gpu *gpu;
	struct ci *ci;

	TRY(resolve_gi(call, instance, &t));
	if (!out)
		return NVML_ERROR_INVALID_ARGUMENT;
	TRY(require_root());
	TRY(find_id(call, &t, id, &profile));
	if (placement && (placement->size != profile.size || placement->start >= MAX_CIS ||
			  !memchr(profile.starts, (int)placement->start, profile.start_count)))
		return NVML_ERROR_INVALID_ARGUMENT;
	if (!headroom(&t, &profile, call->now))
		return NVML_ERROR_INSUFFICIENT_RESOURCES;
	for (unsigned i = 0; i < profile.start_count && start < 0; i++) {
		unsigned candidate = placement ? placement->start : profile.starts[i];

		if (place_free(t.gi, candidate, profile.size, call->now))
			start = (int)candidate;
	}
	while (ci_id < MAX_CIS && ci_takes_place(&t.gi->ci[ci_id], call->now))
		ci_id++;
	if (start < 0 || ci_id == MAX_CIS)
		return NVML_ERROR_INSUFFICIENT_RESOURCES;

	body = call_write(call);
	gpu = &body->gpus[t.index];
	ci = &gpu->gi[t.gi_id].ci[ci_id];
	memset(ci, 0, sizeof(*ci));
	ci->serial = body->next_serial++;
	ci->profile = (uint8_t)profile.enum_id;
	ci->start = (uint8_t)start;
	ci->size = (uint8_t)profile.size;
	ci->slices = (uint8_t)profile.slices;
	random_uuid(ci->uuid, 5); /* NVIDIA's are name-based; new ones each time all the same */
	ci->born = call_book(call, gpu, OP_CI_CREATE, profile.slices, gpu_model(t.gpu)->compute_slices);
	call->dirty |= TREE_GPU(t.index);
	*out = handle_ci(t.index, t.gi_id, ci_id, ci);
	return NVML_SUCCESS;
}

nvmlReturn_t ci_create(struct call *call, nvmlGpuInstance_t instance, unsigned id, nvmlComputeInstance_t *out)
{
	return create(call, instance, id, NULL, out);
}

nvmlReturn_t ci_create_at(struct call *call, nvmlGpuInstance_t instance, unsigned id,
			  const nvmlPlacement_t *placement, nvmlComputeInstance_t *out)
{
	return placement ? create(call, instance, id, placement, out) : NVML_ERROR_INVALID_ARGUMENT;
}

nvmlReturn_t ci_destroy(struct call *call, nvmlComputeInstance_t instance)
{
	struct target t;
	struct gpu *gpu;
	int64_t gone;

	TRY(resolve_ci(call, instance, &t));
	TRY(require_root());
	if (process_on_ci(call->body, t.ci) || atomic_load(&call->machine->file->ci_stuck_until) > call->now)
		return NVML_ERROR_IN_USE;
	gpu = &call_write(call)->gpus[t.index];
	gone = call_book(call, gpu, OP_CI_DESTROY, t.ci->slices, gpu_model(t.gpu)->compute_slices);
	gpu->gi[t.gi_id].ci[t.ci_id].gone = gone;
	load_add_up(gpu, call->now);
	call->dirty |= TREE_GPU(t.index);
	return NVML_SUCCESS;
}

/* --- look-up ---------------------------------------------------------------- */

nvmlReturn_t ci_list(struct call *call, nvmlGpuInstance_t instance, unsigned id, nvmlComputeInstance_t *instances,
		     unsigned *count)
{
	struct ci_profile profile;
	struct target t;
	unsigned n = 0;

	TRY(resolve_gi(call, instance, &t));
	if (!instances || !count)
		return NVML_ERROR_INVALID_ARGUMENT;
	TRY(require_root());
	TRY(find_id(call, &t, id, &profile));
	for (unsigned j = 0; j < MAX_CIS; j++)
		if (ci_visible(&t.gi->ci[j], call->now) && t.gi->ci[j].profile == profile.enum_id)
			instances[n++] = handle_ci(t.index, t.gi_id, j, &t.gi->ci[j]);
	*count = n;
	return NVML_SUCCESS;
}

nvmlReturn_t ci_by_id(struct call *call, nvmlGpuInstance_t instance, unsigned id, nvmlComputeInstance_t *out)
{
	struct target t;

	TRY(resolve_gi(call, instance, &t));
	if (!out)
		return NVML_ERROR_INVALID_ARGUMENT;
	TRY(require_root());
	if (id >= MAX_CIS || !ci_visible(&t.gi->ci[id], call->now))
		return NVML_ERROR_NOT_FOUND;
	*out = handle_ci(t.index, t.gi_id, id, &t.gi->ci[id]);
	return NVML_SUCCESS;
}

nvmlReturn_t ci_info_v1(struct call *call, nvmlComputeInstance_t instance, nvmlComputeInstanceInfo_v1_t *info)
{
	nvmlComputeInstanceInfo_t v2;

	TRY(ci_info(call, instance, info ? &v2 : NULL));
	*info = (nvmlComputeInstanceInfo_v1_t){v2.device, v2.gpuInstance, v2.id, v2.profileId};
	return NVML_SUCCESS;
}

nvmlReturn_t ci_info(struct call *call, nvmlComputeInstance_t instance, nvmlComputeInstanceInfo_t *info)
{
	struct target t;

	TRY(resolve_ci(call, instance, &t));
	if (!info)
		return NVML_ERROR_INVALID_ARGUMENT;
	*info = (nvmlComputeInstanceInfo_t){
		.device = has_variant(call, VARIANT_CI_NAMES_GPU) ? handle_gpu(call, t.index) :
								    handle_mig(t.index, t.gi_id, t.ci_id, t.ci),
		.gpuInstance = handle_gi(t.index, t.gi_id, t.gi),
		.id = t.ci_id,
		.profileId = profile_id(call, t.ci->profile),
		.placement = {t.ci->start, t.ci->size},
	};
	return NVML_SUCCESS;
}

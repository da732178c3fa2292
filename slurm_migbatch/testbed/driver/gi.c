/* GPU instances: profiles, placements, capacity, life-cycle. */
#include <stdio.h>
#include <string.h>

#include "api.h"
#include "mig.h"

/* --- profiles -------------------------------------------------------------- */

/* What every version of the struct says. */
#define PROFILE_FIELDS(profile)                                                       \
	.id = (profile)->id, .sliceCount = (profile)->g, .instanceCount = (profile)->max, \
	.multiprocessorCount = (profile)->sm, .copyEngineCount = (profile)->ce,           \
	.decoderCount = (profile)->dec, .encoderCount = (profile)->enc,                   \
	.jpegCount = (profile)->jpeg, .ofaCount = (profile)->ofa, .memorySizeMB = (profile)->memory_mb

nvmlReturn_t gi_profile_info(struct call *call, nvmlDevice_t device, unsigned profile_enum,
			     nvmlGpuInstanceProfileInfo_v1_t *info)
{
	const struct profile *profile;
	struct target t;

	TRY(resolve_gpu(call, device, &t));
	if (!info || profile_enum >= NVML_GPU_INSTANCE_PROFILE_COUNT)
		return NVML_ERROR_INVALID_ARGUMENT;
	profile = profile_by_enum(gpu_model(t.gpu), profile_enum);
	if (!profile)
		return NVML_ERROR_NOT_SUPPORTED;
	*info = (nvmlGpuInstanceProfileInfo_v1_t){
		PROFILE_FIELDS(profile),
	};
	return NVML_SUCCESS;
}

/* The caller's version word says which struct it passed. With MIG off it is not written back, and v3 has no name, as
 * recorded; with MIG on no real driver was asked. */
static nvmlReturn_t give_profile(const struct gpu *gpu, const struct profile *profile, void *info)
{
	unsigned version = *(const unsigned *)info, written = gpu->mig_current ? version : 0;

	if (version == NVML_VERSION_WORD(nvmlGpuInstanceProfileInfo_v2_t, 2)) {
		nvmlGpuInstanceProfileInfo_v2_t *v2 = info;

		*v2 = (nvmlGpuInstanceProfileInfo_v2_t){
			.version = written,
			PROFILE_FIELDS(profile),
		};
		snprintf(v2->name, sizeof(v2->name), "MIG %s", profile->name);
		return NVML_SUCCESS;
	}
	if (version == NVML_VERSION_WORD(nvmlGpuInstanceProfileInfo_v3_t, 3)) {
		nvmlGpuInstanceProfileInfo_v3_t *v3 = info;

		*v3 = (nvmlGpuInstanceProfileInfo_v3_t){
			.version = written,
			PROFILE_FIELDS(profile),
			.capabilities = profile->gfx ? NVML_GPU_INSTANCE_PROFILE_CAPS_GFX : 0,
		};
		if (gpu->mig_current)
			snprintf(v3->name, sizeof(v3->name), "MIG %s", profile->name);
		return NVML_SUCCESS;
	}
	return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
}

nvmlReturn_t gi_profile_info_v(struct call *call, nvmlDevice_t device, unsigned profile_enum, void *info)
{
	const struct profile *profile;
	struct target t;

	TRY(resolve_gpu(call, device, &t));
	if (!info || profile_enum >= NVML_GPU_INSTANCE_PROFILE_COUNT)
		return NVML_ERROR_INVALID_ARGUMENT;
	profile = profile_by_enum(gpu_model(t.gpu), profile_enum);
	return profile ? give_profile(t.gpu, profile, info) : NVML_ERROR_NOT_SUPPORTED;
}

/* What a call answers for a profile id that this GPU does not have: INVALID_ARGUMENT for one that no GPU has. For one
 * that other GPUs have, the calls differ; so it was recorded with MIG off, with MIG on it is not known. */
static nvmlReturn_t without(const struct gpu *gpu, unsigned id, nvmlReturn_t known)
{
	return !gpu->mig_current && profile_id_known(id) ? known : NVML_ERROR_INVALID_ARGUMENT;
}

nvmlReturn_t gi_profile_info_by_id(struct call *call, nvmlDevice_t device, unsigned id, void *info)
{
	const struct profile *profile;
	struct target t;

	TRY(resolve_gpu_for(call, device, info, &t));
	profile = profile_by_id(gpu_model(t.gpu), id);
	return profile ? give_profile(t.gpu, profile, info) : without(t.gpu, id, NVML_ERROR_NOT_FOUND);
}

/* Starts in ascending order, as the driver lists them. `count` is only written: the array must be large enough. */
nvmlReturn_t gi_placements(struct call *call, nvmlDevice_t device, unsigned id, nvmlPlacement_t *placements,
			   unsigned *count)
{
	const struct profile *profile;
	struct target t;
	unsigned n = 0;

	TRY(resolve_gpu_for(call, device, count, &t));
	TRY(require_root());
	profile = profile_by_id(gpu_model(t.gpu), id);
	if (!profile)
		return without(t.gpu, id, NVML_ERROR_NOT_SUPPORTED);
	*count = profile->start_count;
	for (unsigned start = 0; placements && start < gpu_model(t.gpu)->memory_slices; start++)
		if (memchr(profile->starts, (int)start, profile->start_count))
			placements[n++] = (nvmlPlacement_t){start, profile->size};
	return NVML_SUCCESS;
}

/* Before _v2 there was no asking for the number alone, and there were no media extensions. */
nvmlReturn_t gi_placements_v1(struct call *call, nvmlDevice_t device, unsigned id, nvmlPlacement_t *placements,
			      unsigned *count)
{
	const struct profile *profile;
	struct target t;

	TRY(resolve_gpu_for(call, device, placements, &t));
	profile = profile_by_id(gpu_model(t.gpu), id);
	if (profile && (profile->enum_id == GI_1_SLICE_REV1 || profile->enum_id == GI_2_SLICE_REV1))
		return NVML_ERROR_NOT_SUPPORTED;
	return gi_placements(call, device, id, placements, count);
}

/* --- what is left of a GPU -------------------------------------------------- */

/* What the instances of a GPU take, those on their way in or out included. */
struct taken {
	unsigned slices, dec, enc, jpeg, ofa, same;
};

static struct taken take(const struct gpu *gpu, const struct profile *profile, int64_t now)
{
	struct taken taken = {0};

	for (unsigned i = 0; i < MAX_GIS; i++) {
		const struct profile *other;

		if (!gi_takes_place(&gpu->gi[i], now))
			continue;
		other = gi_profile(gpu, &gpu->gi[i]);
		taken.slices += other->g;
		taken.dec += other->dec;
		taken.enc += other->enc;
		taken.jpeg += other->jpeg;
		taken.ofa += other->ofa;
		taken.same += other == profile;
	}
	return taken;
}

/* How many more of `profile` the compute slices, the media engines and its own maximum allow. An instance with all
 * media engines leaves room for nothing but -me profiles by these numbers alone. */
static unsigned headroom(const struct gpu *gpu, const struct profile *profile, int64_t now)
{
	const struct model *model = gpu_model(gpu);
	const struct profile *full = profile_full(model);
	struct taken taken = take(gpu, profile, now);
	unsigned room = taken.same < profile->max ? profile->max - taken.same : 0;
#define LIMIT(total, used, need)                                             \
	do {                                                                 \
		unsigned fit = (need) ? ((total) - (used)) / (need) : room;   \
		room = fit < room ? fit : room;                              \
	} while (0)

	LIMIT(model->compute_slices, taken.slices, profile->g);
	LIMIT(full->dec, taken.dec, profile->dec);
	LIMIT(full->enc, taken.enc, profile->enc);
	LIMIT(full->jpeg, taken.jpeg, profile->jpeg);
	LIMIT(full->ofa, taken.ofa, profile->ofa);
#undef LIMIT
	return room;
}

static bool place_free(const struct gpu *gpu, unsigned start, unsigned size, int64_t now)
{
	for (unsigned i = 0; i < MAX_GIS; i++) {
		const struct gi *gi = &gpu->gi[i];

		if (gi_takes_place(gi, now) && start < gi->start + gi->size && gi->start < start + size)
			return false;
	}
	return true;
}

nvmlReturn_t gi_capacity(struct call *call, nvmlDevice_t device, unsigned id, unsigned *count)
{
	const struct profile *profile;
	unsigned places = 0, room;
	struct target t;

	TRY(resolve_gpu_for(call, device, count, &t));
	TRY(require_root());
	profile = profile_by_id(gpu_model(t.gpu), id);
	if (!profile)
		return without(t.gpu, id, NVML_ERROR_NOT_SUPPORTED);
	for (unsigned i = 0; i < profile->start_count; i++) /* places of one profile do not overlap each other */
		places += place_free(t.gpu, profile->starts[i], profile->size, call->now);
	room = headroom(t.gpu, profile, call->now);
	*count = places < room ? places : room;
	return NVML_SUCCESS;
}

/* --- life-cycle ------------------------------------------------------------- */

static nvmlReturn_t create(struct call *call, nvmlDevice_t device, unsigned id, const nvmlPlacement_t *placement,
			   nvmlGpuInstance_t *out)
{
	const struct profile *profile;
	const struct model *model;
	int start = -1;
	struct target t;
	struct body *body;
	struct gpu *gpu;
	struct gi *gi;
	unsigned gi_id;

	TRY(resolve_gpu_for(call, device, out, &t));
	TRY(require_root());
	TRY(require_mig(t.gpu));
	model = gpu_model(t.gpu);
	profile = profile_by_id(model, id);
	if (!profile)
		return NVML_ERROR_INVALID_ARGUMENT;
	if (placement && (placement->size != profile->size || placement->start > model->memory_slices ||
			  !memchr(profile->starts, (int)placement->start, profile->start_count)))
		return NVML_ERROR_INVALID_ARGUMENT;
	if (!headroom(t.gpu, profile, call->now))
		return NVML_ERROR_INSUFFICIENT_RESOURCES;
	for (unsigned i = 0; i < profile->start_count && start < 0; i++) {
		unsigned candidate = placement ? placement->start : profile->starts[i];

		if (place_free(t.gpu, candidate, profile->size, call->now))
			start = (int)candidate;
	}
	if (start < 0)
		return NVML_ERROR_INSUFFICIENT_RESOURCES;

	gi_id = gi_id_of(model, (unsigned)start, profile->size);
	body = call_write(call);
	gpu = &body->gpus[t.index];
	gi = &gpu->gi[gi_id];
	memset(gi, 0, sizeof(*gi));
	gi->serial = body->next_serial++;
	gi->profile = (uint8_t)(profile - model->profiles);
	gi->start = (uint8_t)start;
	gi->size = (uint8_t)profile->size;
	gi->born = call_book(call, gpu, OP_GI_CREATE, profile->size, model->memory_slices);
	call->dirty |= TREE_GPU(t.index);
	*out = handle_gi(t.index, gi_id, gi);
	return NVML_SUCCESS;
}

nvmlReturn_t gi_create(struct call *call, nvmlDevice_t device, unsigned id, nvmlGpuInstance_t *out)
{
	return create(call, device, id, NULL, out);
}

nvmlReturn_t gi_create_at(struct call *call, nvmlDevice_t device, unsigned id, const nvmlPlacement_t *placement,
			  nvmlGpuInstance_t *out)
{
	return placement ? create(call, device, id, placement, out) : NVML_ERROR_INVALID_ARGUMENT;
}

nvmlReturn_t gi_destroy(struct call *call, nvmlGpuInstance_t instance)
{
	struct target t;
	struct gpu *gpu;
	int64_t gone;

	TRY(resolve_gi(call, instance, &t));
	TRY(require_root());
	for (unsigned j = 0; j < MAX_CIS; j++) /* processes live on compute instances, so these stand for them too */
		if (ci_takes_place(&t.gi->ci[j], call->now))
			return NVML_ERROR_IN_USE;
	if (atomic_load(&call->machine->file->gi_stuck_until) > call->now)
		return NVML_ERROR_IN_USE;
	gpu = &call_write(call)->gpus[t.index];
	gone = call_book(call, gpu, OP_GI_DESTROY, t.gi->size, gpu_model(t.gpu)->memory_slices);
	gpu->gi[t.gi_id].gone = gone;
	call->dirty |= TREE_GPU(t.index);
	return NVML_SUCCESS;
}

/* --- look-up ---------------------------------------------------------------- */

nvmlReturn_t gi_list(struct call *call, nvmlDevice_t device, unsigned id, nvmlGpuInstance_t *instances,
		     unsigned *count)
{
	const struct profile *profile;
	struct target t;
	unsigned n = 0;

	TRY(resolve_gpu_for(call, device, count ? instances : NULL, &t));
	TRY(require_root());
	profile = profile_by_id(gpu_model(t.gpu), id);
	if (!profile) {
		TRY(without(t.gpu, id, NVML_SUCCESS));
		*count = 0;
		return NVML_SUCCESS;
	}
	for (unsigned i = 0; i < MAX_GIS; i++)
		if (gi_visible(&t.gpu->gi[i], call->now) && gi_profile(t.gpu, &t.gpu->gi[i]) == profile)
			instances[n++] = handle_gi(t.index, i, &t.gpu->gi[i]);
	*count = n;
	return NVML_SUCCESS;
}

nvmlReturn_t gi_by_id(struct call *call, nvmlDevice_t device, unsigned id, nvmlGpuInstance_t *out)
{
	struct target t;

	TRY(resolve_gpu_for(call, device, out, &t));
	TRY(require_root());
	if (id >= MAX_GIS || !gi_visible(&t.gpu->gi[id], call->now))
		return NVML_ERROR_NOT_FOUND;
	*out = handle_gi(t.index, id, &t.gpu->gi[id]);
	return NVML_SUCCESS;
}

nvmlReturn_t gi_info(struct call *call, nvmlGpuInstance_t instance, nvmlGpuInstanceInfo_t *info)
{
	struct target t;

	TRY(resolve_gi(call, instance, &t));
	if (!info)
		return NVML_ERROR_INVALID_ARGUMENT;
	*info = (nvmlGpuInstanceInfo_t){
		.device = handle_gpu(call, t.index),
		.id = t.gi_id,
		.profileId = gi_profile(t.gpu, t.gi)->id,
		.placement = {t.gi->start, t.gi->size},
	};
	return NVML_SUCCESS;
}

/* Loads over time, and how the loads of instances add up. */
#include "load.h"

#include <string.h>

const char *const load_names[LOAD_COUNT] = {
#define LOAD(kind, name, unit) name,
#include "loads.h"
#undef LOAD
};

const enum load_unit load_units[LOAD_COUNT] = {
#define LOAD(kind, name, unit) unit,
#include "loads.h"
#undef LOAD
};

uint64_t load_total(const struct load *load, enum load_kind kind, int64_t now)
{
	return load->total[kind] + load->rate[kind] * (uint64_t)(now / 1000 - load->since);
}

static void change(struct load *load, const uint64_t rate[LOAD_COUNT], int64_t now)
{
	for (unsigned kind = 0; kind < LOAD_COUNT; kind++) {
		uint64_t limit = load_units[kind] == TRAFFIC ? UINT32_MAX : LOAD_FULL;

		load->total[kind] = load_total(load, kind, now);
		load->rate[kind] = (uint32_t)(rate[kind] < limit ? rate[kind] : limit);
	}
	load->since = now / 1000;
}

void load_set_gpu(struct gpu *gpu, const uint32_t rate[LOAD_COUNT], int64_t now)
{
	uint64_t wide[LOAD_COUNT];

	for (unsigned kind = 0; kind < LOAD_COUNT; kind++)
		wide[kind] = rate[kind];
	change(&gpu->load, wide, now);
}

/* Adds the part's rates to the whole's; the part has so much of the whole's SMs and memory. */
static void add(uint64_t whole[LOAD_COUNT], const uint32_t part[LOAD_COUNT], uint64_t sm, uint64_t of_sm,
		uint64_t memory, uint64_t of_memory)
{
	for (unsigned kind = 0; kind < LOAD_COUNT; kind++)
		switch (load_units[kind]) {
		case SHARE: whole[kind] += part[kind] * sm / of_sm; break;
		case MEMORY_SHARE: whole[kind] += part[kind] * memory / of_memory; break;
		case TRAFFIC: whole[kind] += part[kind]; break;
		}
}

void load_add_up(struct gpu *gpu, int64_t now)
{
	const struct model *model = gpu_model(gpu);
	uint64_t whole[LOAD_COUNT] = {0};

	if (!gpu->mig_current)
		return;
	for (unsigned i = 0; i < MAX_GIS; i++) {
		struct gi *gi = &gpu->gi[i];
		const struct profile *profile;
		uint64_t together[LOAD_COUNT] = {0};

		if (!gi->serial || gi->gone)
			continue;
		profile = gi_profile(gpu, gi);
		for (unsigned j = 0; j < MAX_CIS; j++) {
			const struct ci *ci = &gi->ci[j];
			struct ci_profile compute;

			if (!ci->serial || ci->gone || !ci_profile_get(model, profile, ci->profile, &compute))
				continue;
			/* compute instances share the memory of their GPU instance */
			add(together, ci->load, compute.sm, profile->sm, 1, 1);
		}
		change(&gi->load, together, now);
		add(whole, gi->load.rate, profile->sm, profile_full(model)->sm, gi->size, model->memory_slices);
	}
	change(&gpu->load, whole, now);
}

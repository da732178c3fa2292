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

const struct load *load_of_gi(const struct gpu *gpu, const struct gi *gi)
{
	static const struct load none;

	for (unsigned n = 0; n < MAX_LIVE; n++)
		if (gpu->gi_loads[n].serial == gi->serial)
			return &gpu->gi_loads[n].load;
	return &none;
}

static bool lives(const struct gpu *gpu, uint64_t serial)
{
	for (unsigned i = 0; i < MAX_GIS; i++) {
		const struct gi *gi = &gpu->gi[i];

		if (!gi->serial || gi->gone)
			continue;
		if (gi->serial == serial)
			return true;
		for (unsigned j = 0; j < MAX_CIS; j++)
			if (gi->ci[j].serial == serial && !gi->ci[j].gone)
				return true;
	}
	return false;
}

/* Forgets the loads of instances that are gone. */
static void sweep(struct gpu *gpu)
{
	for (unsigned n = 0; n < MAX_LIVE; n++) {
		if (gpu->gi_loads[n].serial && !lives(gpu, gpu->gi_loads[n].serial))
			memset(&gpu->gi_loads[n], 0, sizeof(gpu->gi_loads[n]));
		if (gpu->ci_loads[n].serial && !lives(gpu, gpu->ci_loads[n].serial))
			memset(&gpu->ci_loads[n], 0, sizeof(gpu->ci_loads[n]));
	}
}

void load_set_ci(struct gpu *gpu, uint64_t serial, const uint32_t rate[LOAD_COUNT], int64_t now)
{
	unsigned entry = MAX_LIVE;

	sweep(gpu);
	for (unsigned n = 0; n < MAX_LIVE; n++)
		if (gpu->ci_loads[n].serial == serial || (!gpu->ci_loads[n].serial && entry == MAX_LIVE)) {
			entry = n;
			if (gpu->ci_loads[n].serial)
				break;
		}
	if (entry < MAX_LIVE) {
		gpu->ci_loads[entry].serial = serial;
		memcpy(gpu->ci_loads[entry].rate, rate, sizeof(gpu->ci_loads[entry].rate));
	}
	load_add_up(gpu, now);
}

/* The rates of a compute instance, NULL where it is at rest. */
static const uint32_t *rates_of_ci(const struct gpu *gpu, const struct ci *ci)
{
	for (unsigned n = 0; n < MAX_LIVE && ci->serial; n++)
		if (gpu->ci_loads[n].serial == ci->serial)
			return gpu->ci_loads[n].rate;
	return NULL;
}

static struct load *entry_of_gi(struct gpu *gpu, const struct gi *gi)
{
	for (unsigned n = 0; n < MAX_LIVE; n++)
		if (gpu->gi_loads[n].serial == gi->serial)
			return &gpu->gi_loads[n].load;
	for (unsigned n = 0; n < MAX_LIVE; n++)
		if (!gpu->gi_loads[n].serial) {
			gpu->gi_loads[n].serial = gi->serial;
			return &gpu->gi_loads[n].load;
		}
	return NULL;
}

void load_add_up(struct gpu *gpu, int64_t now)
{
	const struct model *model = gpu_model(gpu);
	uint64_t whole[LOAD_COUNT] = {0};

	if (!gpu->mig_current)
		return;
	sweep(gpu);
	for (unsigned i = 0; i < MAX_GIS; i++) {
		const struct gi *gi = &gpu->gi[i];
		const struct profile *profile = gi_profile(gpu, gi);
		uint64_t together[LOAD_COUNT] = {0};
		struct load *load;

		load = gi->serial && !gi->gone ? entry_of_gi(gpu, gi) : NULL;
		if (!load)
			continue;
		for (unsigned j = 0; j < MAX_CIS; j++) {
			const uint32_t *rate = rates_of_ci(gpu, &gi->ci[j]);
			struct ci_profile compute;

			/* compute instances share the memory of their GPU instance */
			if (rate && ci_profile_get(model, profile, gi->ci[j].profile, &compute))
				add(together, rate, compute.sm, profile->sm, 1, 1);
		}
		change(load, together, now);
		add(whole, load->rate, profile->sm, profile_full(model)->sm, gi->size, model->memory_slices);
	}
	change(&gpu->load, whole, now);
}

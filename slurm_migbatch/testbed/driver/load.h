/* Simulated load of devices. */
#ifndef SIM_LOAD_H
#define SIM_LOAD_H

#include "state.h"

/* A share of the SMs, of the memory's bandwidth, or traffic. */
enum load_unit { SHARE, MEMORY_SHARE, TRAFFIC };

#define LOAD_FULL 10000 /* of a share */

extern const char *const load_names[LOAD_COUNT];
extern const enum load_unit load_units[LOAD_COUNT];

/* Sets the load of a GPU without MIG. */
void load_set_gpu(struct gpu *gpu, const uint32_t rate[LOAD_COUNT], int64_t now);

/* Sets the load of a compute instance. */
void load_set_ci(struct gpu *gpu, uint64_t serial, const uint32_t rate[LOAD_COUNT], int64_t now);

/* The load of a GPU instance: that of its compute instances together. */
const struct load *load_of_gi(const struct gpu *gpu, const struct gi *gi);

/* Adds the loads of compute instances up anew, after one of them has changed, come or gone. */
void load_add_up(struct gpu *gpu, int64_t now);

/* What was done until `now`, in the unit of the rate times microseconds. */
uint64_t load_total(const struct load *load, enum load_kind kind, int64_t now);

#endif

/* What the simulated hardware is: GPU models and their MIG profiles (tables.c). */
#ifndef SIM_MODEL_H
#define SIM_MODEL_H

#include <stdbool.h>

#define MAX_STARTS 8

/* One GPU instance profile of one model. */
struct profile {
	const char *name;	   /* as nvidia-smi prints it, "1g.10gb+me" */
	unsigned id;		   /* the device's own profile id, what create and list take */
	unsigned enum_id;	   /* NVML_GPU_INSTANCE_PROFILE_*, what only the info calls take */
	unsigned g;		   /* compute slices */
	unsigned size;		   /* memory slices (placement units) */
	unsigned memory_mb;	   /* MiB */
	unsigned sm;		   /* multiprocessors */
	unsigned ce, dec, enc, jpeg, ofa;
	unsigned max;		   /* instances of this profile on an empty GPU */
	unsigned start_count;
	unsigned char starts[MAX_STARTS]; /* allowed starts, in the order a create without placement tries */
	bool gfx;
};

/* One GPU model. Engine totals are those of the largest profile. */
struct model {
	const char *key;  /* "h100-80gb": the name tests use */
	const char *name; /* what nvmlDeviceGetName says */
	unsigned arch;	  /* NVML_DEVICE_ARCH_* */
	unsigned cc_major, cc_minor;
	unsigned compute_slices, memory_slices;
	unsigned memory_mib;	/* framebuffer */
	unsigned pci_device_id, pci_subsystem_id;
	unsigned cores;
	unsigned bus_width;	/* bits */
	unsigned bar1_gib;
	unsigned graphics_mhz, memory_mhz, video_mhz; /* maxima */
	unsigned power_limit_w, least_power_w;
	unsigned nvlinks;
	unsigned ci3_size;	/* compute-placement size of the full 3-slice compute instance */
	unsigned profile_count;
	const struct profile *profiles;
};

/* One compute instance profile inside a GPU instance with g compute slices. */
struct ci_profile {
	unsigned enum_id; /* also its id */
	unsigned slices;
	unsigned size;	  /* placement size, compute slices */
	unsigned max;
	unsigned start_count;
	unsigned char starts[MAX_STARTS];
	unsigned sm;
	bool whole; /* takes all of the GPU instance */
};

/* NVML_GPU_INSTANCE_PROFILE_*: one or two compute slices with the media engines, one with twice the memory. */
#define GI_1_SLICE_REV1 7
#define GI_2_SLICE_REV1 8
#define GI_1_SLICE_REV2 9

/* NVML_COMPUTE_INSTANCE_PROFILE_*: those that share their slice count with another one. */
#define CI_1_SLICE_REV1 7
#define CI_7_SLICE 4
#define CI_7_SLICE_NVL 8

extern const struct model sim_models[];
extern const unsigned sim_model_count;

const struct model *model_by_key(const char *key);
const struct profile *profile_by_id(const struct model *model, unsigned id);
const struct profile *profile_by_enum(const struct model *model, unsigned enum_id);
/* Whether a GPU of any model has a profile with this id. */
bool profile_id_known(unsigned id);
const struct profile *profile_full(const struct model *model);

/* The compute profile `enum_id` in an instance of `profile`; false where it does not exist. */
bool ci_profile_get(const struct model *model, const struct profile *profile, unsigned enum_id,
		    struct ci_profile *out);

/* "3g.20gb" for a compute profile that takes the whole GPU instance, else "1c.3g.20gb". */
void ci_profile_name(const struct profile *profile, const struct ci_profile *compute, char *text, unsigned length);

/* GPU instance id: intervals number a binary tree from the whole GPU (0) down. */
unsigned gi_id_of(const struct model *model, unsigned start, unsigned size);

#endif

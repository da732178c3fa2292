/* GPU models and MIG profiles.
 *
 * Sources: nvidia-smi listings, NVIDIA's MIG user guide, and recorded answers of
 * real drivers (tests/support/recorded). Rows that were derived rather than read
 * from a listing say so. Memory is what the driver reports (GiB column of
 * `nvidia-smi mig -lgip` x 1024). The tests hold these rows to a table of their
 * own, with the source of each (tests/support/gpu_facts.py).
 */
#include "model.h"

#include <stdio.h>
#include <string.h>

#include "abi.h"

#define COUNT(array) (sizeof(array) / sizeof((array)[0]))

/* Starts, in the order in which a create without placement tries them. The
 * order differs from model to model on hardware; nothing should rely on it. */
#define S1_AMPERE 7, {6, 4, 5, 0, 1, 2, 3}
#define S1 7, {0, 1, 2, 3, 4, 5, 6}
#define S2D 4, {0, 2, 4, 6}
#define S2 3, {0, 2, 4}
#define S3 2, {4, 0}
#define S0 1, {0}

/*	 name, id, enum, g, size, MiB, SM, CE, DEC, ENC, JPEG, OFA, max, starts, gfx */
static const struct profile a30[] = {
	{"1g.6gb", 14, 0x0, 1, 1, 5952, 14, 1, 0, 0, 0, 0, 4, 4, {0, 1, 2, 3}, false},
	{"1g.6gb+me", 21, 0x7, 1, 1, 5952, 14, 1, 1, 0, 1, 1, 1, 4, {0, 1, 2, 3}, false},
	{"2g.12gb", 5, 0x1, 2, 2, 11968, 28, 2, 2, 0, 0, 0, 2, 2, {0, 2}, false},
	{"2g.12gb+me", 6, 0x8, 2, 2, 11968, 28, 2, 2, 0, 1, 1, 1, 2, {0, 2}, false},
	{"4g.24gb", 0, 0x3, 4, 4, 24064, 56, 4, 4, 0, 1, 1, 1, S0, false},
};

static const struct profile a100_40[] = {
	{"1g.5gb", 19, 0x0, 1, 1, 4864, 14, 1, 0, 0, 0, 0, 7, S1_AMPERE, false},
	{"1g.5gb+me", 20, 0x7, 1, 1, 4864, 14, 1, 1, 0, 1, 1, 1, S1_AMPERE, false},
	{"1g.10gb", 15, 0x9, 1, 2, 9856, 14, 1, 1, 0, 0, 0, 4, S2D, false},
	{"2g.10gb", 14, 0x1, 2, 2, 9856, 28, 2, 1, 0, 0, 0, 3, S2, false},
	{"3g.20gb", 9, 0x2, 3, 4, 19968, 42, 3, 2, 0, 0, 0, 2, S3, false},
	{"4g.20gb", 5, 0x3, 4, 4, 19968, 56, 4, 2, 0, 0, 0, 1, S0, false},
	{"7g.40gb", 0, 0x4, 7, 8, 40192, 98, 7, 5, 0, 1, 1, 1, S0, false},
};

static const struct profile a100_80[] = {
	{"1g.10gb", 19, 0x0, 1, 1, 9728, 14, 1, 0, 0, 0, 0, 7, S1_AMPERE, false},
	{"1g.10gb+me", 20, 0x7, 1, 1, 9728, 14, 1, 1, 0, 1, 1, 1, S1_AMPERE, false},
	{"1g.20gb", 15, 0x9, 1, 2, 19968, 14, 1, 1, 0, 0, 0, 4, S2D, false},
	{"2g.20gb", 14, 0x1, 2, 2, 19968, 28, 2, 1, 0, 0, 0, 3, S2, false},
	{"3g.40gb", 9, 0x2, 3, 4, 40192, 42, 3, 2, 0, 0, 0, 2, S3, false},
	{"4g.40gb", 5, 0x3, 4, 4, 40192, 56, 4, 2, 0, 0, 0, 1, S0, false},
	{"7g.80gb", 0, 0x4, 7, 8, 80896, 98, 7, 5, 0, 1, 1, 1, S0, false},
};

/* SXM5 */
static const struct profile h100_80[] = {
	{"1g.10gb", 19, 0x0, 1, 1, 9984, 16, 1, 1, 0, 1, 0, 7, S1, false},
	{"1g.10gb+me", 20, 0x7, 1, 1, 9984, 16, 1, 1, 0, 1, 1, 1, S1, false},
	{"1g.20gb", 15, 0x9, 1, 2, 20096, 26, 1, 1, 0, 1, 0, 4, S2D, false},
	{"2g.20gb", 14, 0x1, 2, 2, 20096, 32, 2, 2, 0, 2, 0, 3, S2, false},
	{"3g.40gb", 9, 0x2, 3, 4, 40448, 60, 3, 3, 0, 3, 0, 2, S3, false},
	{"4g.40gb", 5, 0x3, 4, 4, 40448, 64, 4, 4, 0, 4, 0, 1, S0, false},
	{"7g.80gb", 0, 0x4, 7, 8, 81152, 132, 8, 7, 0, 7, 1, 1, S0, false},
};

static const struct profile h200[] = {
	{"1g.18gb", 19, 0x0, 1, 1, 16384, 16, 1, 1, 0, 1, 0, 7, S1, false},
	{"1g.18gb+me", 20, 0x7, 1, 1, 16384, 16, 1, 1, 0, 1, 1, 1, S1, false},
	{"1g.35gb", 15, 0x9, 1, 2, 33280, 26, 1, 1, 0, 1, 0, 4, S2D, false},
	{"2g.35gb", 14, 0x1, 2, 2, 33280, 32, 2, 2, 0, 2, 0, 3, S2, false},
	{"3g.71gb", 9, 0x2, 3, 4, 71424, 60, 3, 3, 0, 3, 0, 2, S3, false},
	{"4g.71gb", 5, 0x3, 4, 4, 71424, 64, 4, 4, 0, 4, 0, 1, S0, false},
	{"7g.141gb", 0, 0x4, 7, 8, 143360, 132, 8, 7, 0, 7, 1, 1, S0, false},
};

/* The first four rows are listed. The others are derived: memory as twice
 * (four times) the listed step, SMs by the rule seen on H100 (3g: 4 x 1g - 4,
 * 4g: 4 x 1g, 7g: the chip's), engines by slice. */
static const struct profile b200[] = {
	{"1g.23gb", 19, 0x0, 1, 1, 20992, 18, 2, 1, 0, 1, 0, 7, S1, false},
	{"1g.23gb+me", 20, 0x7, 1, 1, 20992, 18, 2, 1, 0, 1, 1, 1, S1, false},
	{"1g.45gb", 15, 0x9, 1, 2, 45312, 30, 2, 1, 0, 1, 0, 4, S2D, false},
	{"2g.45gb", 14, 0x1, 2, 2, 45312, 36, 4, 2, 0, 2, 0, 3, S2, false},
	{"3g.90gb", 9, 0x2, 3, 4, 91136, 68, 6, 3, 0, 3, 0, 2, S3, false},	  /* derived */
	{"4g.90gb", 5, 0x3, 4, 4, 91136, 72, 8, 4, 0, 4, 0, 1, S0, false},	  /* derived */
	{"7g.180gb", 0, 0x4, 7, 8, 182784, 148, 16, 7, 0, 7, 1, 1, S0, false}, /* derived */
};

/* Twelve placement units for four compute slices. */
#define R1 4, {0, 3, 6, 9}
#define R2 2, {0, 6}
static const struct profile rtx_pro_6000[] = {
	{"1g.24gb", 14, 0x0, 1, 3, 24192, 46, 1, 1, 1, 1, 0, 4, R1, false},
	{"1g.24gb+me", 21, 0x7, 1, 3, 24192, 46, 1, 1, 1, 1, 1, 1, R1, false},
	{"1g.24gb+gfx", 47, 0xA, 1, 3, 24192, 46, 1, 1, 1, 1, 0, 4, R1, true},
	{"1g.24gb+me.all", 65, 0xF, 1, 3, 24192, 46, 1, 4, 4, 4, 1, 1, R1, false},
	{"1g.24gb-me", 67, 0xD, 1, 3, 24192, 46, 1, 0, 0, 0, 0, 4, R1, false},
	{"2g.48gb", 5, 0x1, 2, 6, 48512, 94, 2, 2, 2, 2, 0, 2, R2, false},
	{"2g.48gb+gfx", 35, 0xB, 2, 6, 48512, 94, 2, 2, 2, 2, 0, 2, R2, true},
	{"2g.48gb+me.all", 64, 0x10, 2, 6, 48512, 94, 2, 4, 4, 4, 1, 1, R2, false},
	{"2g.48gb-me", 66, 0xE, 2, 6, 48512, 94, 2, 0, 0, 0, 0, 2, R2, false},
	{"4g.96gb", 0, 0x3, 4, 12, 97408, 188, 4, 4, 4, 4, 1, 1, S0, false},
	{"4g.96gb+gfx", 32, 0xC, 4, 12, 97408, 188, 4, 4, 4, 4, 1, 1, S0, true},
};

#define PROFILES(array) COUNT(array), array

/* Video clock and least power limit are known of H100 and H200 only; the others' are the graphics clock and half. */
const struct model sim_models[] = {
	{"a30", "NVIDIA A30", NVML_DEVICE_ARCH_AMPERE, 8, 0, 4, 4, 24576, 0x20B710DE, 0x153210DE,
	 3584, 3072, 128, 1440, 1215, 1440, 165, 83, 4, 3, PROFILES(a30)},
	{"a100-40gb", "NVIDIA A100-SXM4-40GB", NVML_DEVICE_ARCH_AMPERE, 8, 0, 7, 8, 40960, 0x20B010DE, 0x134F10DE,
	 6912, 5120, 128, 1410, 1215, 1410, 400, 200, 12, 3, PROFILES(a100_40)},
	{"a100-80gb", "NVIDIA A100-SXM4-80GB", NVML_DEVICE_ARCH_AMPERE, 8, 0, 7, 8, 81920, 0x20B210DE, 0x146310DE,
	 6912, 5120, 128, 1410, 1593, 1410, 400, 200, 12, 3, PROFILES(a100_80)},
	{"h100-80gb", "NVIDIA H100 80GB HBM3", NVML_DEVICE_ARCH_HOPPER, 9, 0, 7, 8, 81559, 0x233010DE, 0x16C110DE,
	 16896, 5120, 128, 1980, 2619, 1545, 700, 200, 18, 4, PROFILES(h100_80)},
	{"h200", "NVIDIA H200", NVML_DEVICE_ARCH_HOPPER, 9, 0, 7, 8, 143771, 0x233510DE, 0x18BF10DE,
	 16896, 6016, 256, 1980, 3201, 1545, 700, 200, 18, 4, PROFILES(h200)},
	{"b200", "NVIDIA B200", NVML_DEVICE_ARCH_BLACKWELL, 10, 0, 7, 8, 183359, 0x290110DE, 0x199910DE,
	 18944, 8192, 128, 1965, 3996, 1965, 1000, 500, 18, 4, PROFILES(b200)},
	{"rtx-pro-6000", "NVIDIA RTX PRO 6000 Blackwell Server Edition", NVML_DEVICE_ARCH_BLACKWELL, 12, 0, 4, 12,
	 97887, 0x2BB510DE, 0x204E10DE, 24064, 512, 128, 2430, 12481, 2430, 600, 300, 0, 3, PROFILES(rtx_pro_6000)},
};
const unsigned sim_model_count = COUNT(sim_models);

const struct model *model_by_key(const char *key)
{
	for (unsigned i = 0; i < sim_model_count; i++)
		if (!strcmp(sim_models[i].key, key))
			return &sim_models[i];
	return NULL;
}

const struct profile *profile_by_id(const struct model *model, unsigned id)
{
	for (unsigned i = 0; i < model->profile_count; i++)
		if (model->profiles[i].id == id)
			return &model->profiles[i];
	return NULL;
}

const struct profile *profile_by_enum(const struct model *model, unsigned enum_id)
{
	for (unsigned i = 0; i < model->profile_count; i++)
		if (model->profiles[i].enum_id == enum_id)
			return &model->profiles[i];
	return NULL;
}

bool profile_id_known(unsigned id)
{
	for (unsigned i = 0; i < sim_model_count; i++)
		if (profile_by_id(&sim_models[i], id))
			return true;
	return false;
}

const struct profile *profile_full(const struct model *model)
{
	return profile_by_id(model, 0); /* id 0 is the whole GPU on every model */
}

unsigned gi_id_of(const struct model *model, unsigned start, unsigned size)
{
	return model->memory_slices / size - 1 + start / size;
}

/* Compute slices of the compute profiles, by NVML_COMPUTE_INSTANCE_PROFILE_*; 8- and 6-slice ones exist on none of
 * the models. */
static const unsigned ci_slices[NVML_COMPUTE_INSTANCE_PROFILE_COUNT] = {1, 2, 3, 4, 7, 0, 0, 1, 7};

/* Starts of an s-slice compute instance in a g-slice GPU instance, as `nvidia-smi mig -lcipp` gives them. */
static unsigned ci_starts(unsigned g, unsigned slices, unsigned char starts[MAX_STARTS])
{
	unsigned n = 0;

	switch (slices) {
	case 1:
		for (unsigned s = 0; s < g; s++)
			starts[n++] = (unsigned char)s;
		break;
	case 2:
		for (unsigned s = 0; s + 2 <= g && s <= 4; s += 2)
			starts[n++] = (unsigned char)s;
		break;
	case 3: /* in 3g or 7g only: 4g offers 1c, 2c and 4c */
		if (g == 3 || g == 7)
			starts[n++] = 0;
		if (g == 7)
			starts[n++] = 4;
		break;
	case 4:
	case 7:
		if (g >= slices)
			starts[n++] = 0;
		break;
	}
	return n;
}

/* The multiprocessors of compute profile 1_SLICE_REV1, 0 where there is none: those of a 1g instance with double memory
 * that has more of them than a plain one, as from Hopper on. It was seen in instances with two memory slices. */
static unsigned rev1_sms(const struct model *model, const struct profile *profile)
{
	const struct profile *rich = profile_by_enum(model, GI_1_SLICE_REV2);

	return rich && rich->size == profile->size && rich->sm > profile_by_enum(model, 0)->sm ? rich->sm : 0;
}

bool ci_profile_get(const struct model *model, const struct profile *profile, unsigned enum_id,
		    struct ci_profile *out)
{
	unsigned slices, rev1 = rev1_sms(model, profile);

	if (enum_id >= NVML_COMPUTE_INSTANCE_PROFILE_COUNT)
		return false;
	slices = ci_slices[enum_id];
	if (slices == 0 || (enum_id == CI_1_SLICE_REV1 && !rev1))
		return false;
	memset(out, 0, sizeof(*out));
	out->enum_id = enum_id;
	out->slices = slices;
	out->size = slices;
	out->start_count = enum_id == CI_1_SLICE_REV1 ? 1 : ci_starts(profile->g, slices, out->starts);
	out->max = out->start_count;
	if (out->max == 0)
		return false;
	if (enum_id == CI_1_SLICE_REV1)
		out->sm = rev1;
	else if (slices == profile->g && !(slices == 1 && rev1))
		out->sm = profile->sm;
	else /* a part of an instance gets whole slices of the plain 1g size */
		out->sm = slices * profile_by_enum(model, 0)->sm;
	out->whole = slices == profile->g && out->sm == profile->sm;
	if (out->whole && slices == 3)
		out->size = model->ci3_size;
	return true;
}

void ci_profile_name(const struct profile *profile, const struct ci_profile *compute, char *text, unsigned length)
{
	if (compute->whole)
		snprintf(text, length, "%s", profile->name);
	else
		snprintf(text, length, "%uc.%s", compute->slices, profile->name);
}

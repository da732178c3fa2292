/* What the MIG files share: names, indexes and rules of instances. */
#ifndef SIM_MIG_H
#define SIM_MIG_H

#include "call.h"

/* MIG on, else NOT_SUPPORTED. */
nvmlReturn_t require_mig(const struct gpu *gpu);

/* The profile name of a MIG device, see ci_profile_name. */
void ci_name(const struct target *target, char *text, unsigned length);

/* The compute profile of a target's compute instance. */
struct ci_profile ci_target_profile(const struct target *target);

/* Index of a MIG device on its GPU: contiguous from 0, by GPU instance id, then compute instance id. */
unsigned mig_index(const struct call *call, const struct target *target);

#endif

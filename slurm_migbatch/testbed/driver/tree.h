/* The files beside the state: /proc capability files, device nodes, boot id. */
#ifndef SIM_TREE_H
#define SIM_TREE_H

#include "state.h"

/* Capability minors: 3 + 135 * gpu minor + 9 * GI id, a compute instance + 1 + its id. */
unsigned cap_minor_gi(unsigned gpu_minor, unsigned gi);
unsigned cap_minor_ci(unsigned gpu_minor, unsigned gi, unsigned ci);

/* Files that never change while the machine exists. 0 or a negative errno. */
int tree_create(const struct machine *machine);
/* Makes the instance files and boot_id follow the state, where they are behind; needs the exclusive lock. */
int tree_follow(struct machine *machine);
/* What a reboot wipes and the state does not know: the nodes in dev/nvidia-caps. */
void tree_forget_cap_nodes(const struct machine *machine);

#endif

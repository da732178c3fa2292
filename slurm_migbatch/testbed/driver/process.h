/* The processes that hold a GPU or a MIG device. */
#ifndef SIM_PROCESS_H
#define SIM_PROCESS_H

#include "state.h"

/* Start time of a live process in clock ticks since boot; 0 where it cannot be read. `*alive` is false for a
 * process that has ended, zombies included: they have given the GPU back. */
uint64_t process_start_time(int32_t pid, bool *alive);

/* Whether the entry still holds its device. Ended processes let go by themselves, unless sticky. */
bool process_holds(const struct process *process);

/* Whether a process lives on the compute instance / anywhere on the GPU. */
bool process_on_ci(const struct body *body, const struct ci *ci);
bool process_on_gpu(const struct body *body, unsigned gpu);

/* Drops entries that hold nothing any more. */
void process_sweep(struct body *body);

/* MiB that live processes use. */
uint64_t process_memory_gi(const struct body *body, const struct gi *gi);
uint64_t process_memory_gpu(const struct body *body, unsigned gpu);

#endif

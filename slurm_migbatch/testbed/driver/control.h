/* The hand of the experimenter: called by slurm_migbatch/testbed/simdriver.py.
 *
 * Each function names the machine's directory and returns 0 (or a count, as
 * said) or a negative errno. None of this exists on hardware.
 */
#ifndef SIM_CONTROL_H
#define SIM_CONTROL_H

#include "state.h"

/* Makes the files of a machine. `gpus` holds one line "model minor uuid" per GPU. */
EXPORT int migsim_create(const char *dir, const char *gpus, int mig, unsigned caps_major, int ampere_auto_reset);
/* Power off and on: instances and processes go, MIG mode stays on Ampere only, boot id and device nodes change. */
EXPORT int migsim_reboot(const char *dir);
/* nvidia-smi --gpu-reset: -EBUSY while a process lives on the GPU. */
EXPORT int migsim_reset_gpu(const char *dir, unsigned index);
EXPORT int migsim_set_lost(const char *dir, unsigned index, int lost);
/* `variants` is a sum of enum variant; the ones before it are forgotten. */
EXPORT int migsim_set_variants(const char *dir, unsigned variants);
EXPORT int migsim_set_latency(const char *dir, unsigned op, unsigned base_us, unsigned span_us);
/* -ENOENT: no such function is served; -ENOSPC: too many faults. */
EXPORT int migsim_fail(const char *dir, const char *function, int code, uint64_t nth, uint64_t times, unsigned moment,
		       int kill);
EXPORT int migsim_stick(const char *dir, int64_t gi_ns, int64_t ci_ns);
EXPORT int migsim_reset_faults(const char *dir);
/* sticky < 0: sticky if no such process lives. -ENODEV: no such MIG device, -ENOSPC: table full. */
EXPORT int migsim_start_process(const char *dir, const char *uuid, int pid, uint64_t memory_mib, int sticky);
/* Returns how many entries went. */
EXPORT int migsim_end_process(const char *dir, int pid);
/* Sets the load of a GPU or MIG device, one figure per load name, as enum load_kind; -EINVAL: no such share. */
EXPORT int migsim_set_load(const char *dir, const char *uuid, const uint32_t *rates);
EXPORT unsigned migsim_load_count(void);
EXPORT const char *migsim_load_name(unsigned number);
/* 1 where the load is a share (hundredths of a percent), 0 where it is traffic (MiB/s). */
EXPORT int migsim_load_is_share(unsigned number);
/* Lets an event happen to a GPU: an nvmlEventType* and its data, for an Xid its number. */
EXPORT int migsim_post_event(const char *dir, unsigned index, uint64_t type, uint64_t data);
/* Number and name of the served functions, and the calls each has had. */
EXPORT unsigned migsim_function_count(void);
EXPORT const char *migsim_function_name(unsigned number);
EXPORT int migsim_calls(const char *dir, uint64_t *counts, int reset);
/* JSON of everything; returns its length, which may exceed `size` (then nothing useful was written). */
EXPORT int migsim_dump(const char *dir, char *out, unsigned size);

#endif

/* One call of the interface: session, lock, counters, faults, commit, latency. */
#ifndef SIM_CALL_H
#define SIM_CALL_H

#include "state.h"

enum access { READ, WRITE };

struct call {
	enum function function;
	enum access access;
	struct machine *machine;
	const struct body *body; /* the machine as it is */
	struct body *shadow;	 /* the machine as it will be; NULL until call_write */
	uint64_t dirty;		 /* TREE_* of what was changed */
	int64_t now;
	int64_t ready; /* when the effect is complete; the caller sleeps until then */
	struct fault *late; /* a fault that strikes in this call, later than FAULT_BEFORE */
	bool locked;
};

/* Enter takes the lock and may fail; leave must always follow and returns what the caller gets. */
nvmlReturn_t call_enter(struct call *call, enum function function, enum access access);
nvmlReturn_t call_leave(struct call *call, nvmlReturn_t result);

/* Starts a change; what is written to the returned body counts if the call ends in success. */
struct body *call_write(struct call *call);

/* Books `op` on a GPU: when it will be complete, after the changes of that GPU that are under way. */
int64_t call_book(struct call *call, struct gpu *gpu, enum latency_op op, unsigned size, unsigned of);

/* --- handles ---------------------------------------------------------------
 * A handle names gpu, instance and the serial of the thing; after a destroy,
 * reset or reboot the serial is gone and the handle is invalid. */
struct target {
	unsigned index; /* of the GPU */
	const struct gpu *gpu;
	const struct gi *gi; /* NULL for a whole GPU */
	const struct ci *ci; /* NULL for a GPU or a GPU instance */
	unsigned gi_id, ci_id;
};

nvmlDevice_t handle_gpu(const struct call *call, unsigned index);
nvmlDevice_t handle_mig(unsigned index, unsigned gi_id, unsigned ci_id, const struct ci *ci);
nvmlGpuInstance_t handle_gi(unsigned index, unsigned gi_id, const struct gi *gi);
nvmlComputeInstance_t handle_ci(unsigned index, unsigned gi_id, unsigned ci_id, const struct ci *ci);

/* A GPU or a MIG device. */
nvmlReturn_t resolve_device(const struct call *call, nvmlDevice_t device, struct target *target);
/* A whole GPU; NOT_SUPPORTED for a MIG device. */
nvmlReturn_t resolve_gpu(const struct call *call, nvmlDevice_t device, struct target *target);
/* The same for a call that answers at `out`: INVALID_ARGUMENT without one. */
nvmlReturn_t resolve_device_for(const struct call *call, nvmlDevice_t device, const void *out, struct target *target);
nvmlReturn_t resolve_gpu_for(const struct call *call, nvmlDevice_t device, const void *out, struct target *target);
nvmlReturn_t resolve_gi(const struct call *call, nvmlGpuInstance_t instance, struct target *target);
nvmlReturn_t resolve_ci(const struct call *call, nvmlComputeInstance_t instance, struct target *target);

/* Whether this machine's driver is of that kind. */
bool has_variant(const struct call *call, enum variant variant);

/* NO_PERMISSION unless the caller is root. */
nvmlReturn_t require_root(void);

/* Answers the number that every whole GPU has. */
nvmlReturn_t give_number(const struct call *call, nvmlDevice_t device, unsigned *out, unsigned number);

/* Copies a string out; INSUFFICIENT_SIZE where it does not fit. */
nvmlReturn_t give_text(char *out, unsigned length, const char *text);

#define TRY(expression)                                \
	do {                                           \
		nvmlReturn_t try_result = (expression); \
		if (try_result != NVML_SUCCESS)        \
			return try_result;             \
	} while (0)

#endif

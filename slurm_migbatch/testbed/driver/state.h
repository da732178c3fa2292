/* The machine: one file, mapped by every process that loads the driver.
 *
 * Updates are atomic against SIGKILL: the file holds two copies of everything
 * that must change together (struct body); a writer, under an exclusive flock,
 * prepares the idle copy and then flips `generation`. A writer that dies in
 * between leaves the current copy untouched, and the kernel drops its lock.
 *
 * Time runs inside the state: an instance that is being created or destroyed
 * carries the moment at which that ends. So nothing waits for the process that
 * asked for it, as on hardware, where the kernel finishes what was begun.
 */
#ifndef SIM_STATE_H
#define SIM_STATE_H

#include <limits.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "abi.h"
#include "functions.h"
#include "model.h"

#define MAX_GPUS 32 /* as many as the capability minors allow */
#define MAX_GIS 15  /* ids 0..14 of the binary tree; a GI lives in the entry of its id */
#define MAX_CIS 8
#define MAX_LIVE 8 /* more instances than a GPU can have at once, of either kind */
#define MAX_PROCESSES 512
#define MAX_FAULTS 32
#define MAX_EVENTS 64

/* What a device is busy with. Shares are in hundredths of a percent, traffic in MiB/s. */
enum load_kind {
#define LOAD(kind, name, unit) LOAD_##kind,
#include "loads.h"
#undef LOAD
	LOAD_COUNT
};

/* A load over time: `total` is what was done up to `since`, in the unit of the rate times microseconds. */
struct load {
	int64_t since; /* us */
	uint32_t rate[LOAD_COUNT];
	uint64_t total[LOAD_COUNT];
};

struct ci {
	uint64_t serial; /* never reused; 0: no such instance */
	int64_t born;	 /* ns; before it, the instance takes its place but cannot be seen */
	int64_t gone;	 /* ns; 0: not being destroyed. From then on the place is free */
	uint8_t profile; /* NVML_COMPUTE_INSTANCE_PROFILE_* */
	uint8_t start, size, slices;
	uint8_t uuid[16];
};

struct gi {
	uint64_t serial;
	int64_t born, gone;
	uint8_t profile; /* index into the model's profiles */
	uint8_t start, size;
	struct ci ci[MAX_CIS];
};

/* What a clock is held within, MHz; 0: not locked. */
struct locked {
	uint32_t lowest, highest;
};

struct gpu {
	uint8_t model; /* index into sim_models */
	uint8_t minor;
	uint8_t mig_current, mig_pending;
	uint8_t lost; /* fell off the bus */
	uint8_t uuid[16];
	uint32_t app_graphics_mhz, app_memory_mhz; /* 0: default */
	struct locked locked_graphics, locked_memory;
	struct load load; /* its own without MIG, else that of its instances together */
	struct {
		uint64_t serial; /* of the instance; 0: free entry */
		struct load load;
	} gi_loads[MAX_LIVE];
	struct {
		uint64_t serial;
		uint32_t rate[LOAD_COUNT];
	} ci_loads[MAX_LIVE];
	int64_t busy_until; /* ns; the driver does one change of a GPU at a time */
	struct gi gi[MAX_GIS];
};

struct process {
	int32_t pid; /* 0: free entry */
	uint8_t gpu;
	uint8_t sticky; /* stays when no such process lives */
	uint64_t start_time; /* of the process, clock ticks since boot; 0: unknown */
	uint64_t memory_mib;
	uint64_t ci_serial; /* 0: on the whole GPU */
};

struct body {
	uint8_t boot_id[16];
	uint64_t boots;
	uint64_t next_serial;
	uint32_t gpu_count;
	struct process processes[MAX_PROCESSES];
	struct gpu gpus[MAX_GPUS]; /* last: only gpu_count of them are copied */
};

enum latency_op { OP_GI_CREATE, OP_GI_DESTROY, OP_CI_CREATE, OP_CI_DESTROY, OP_SET_MODE, OP_COUNT };

/* A smallest instance takes `base`, one of the whole GPU base + span. */
struct latency {
	uint32_t base_us, span_us;
};

enum fault_moment {
	FAULT_BEFORE,  /* instead of the effect */
	FAULT_WRITING, /* half-way: the new state is written and not yet valid, so the old one holds */
	FAULT_DURING,  /* the driver has changed its state, the /proc tree has not followed yet */
	FAULT_AFTER,   /* the effect has happened, the caller does not learn it */
};

struct fault {
	_Atomic uint32_t armed;
	uint32_t function;
	uint32_t moment; /* enum fault_moment */
	uint32_t kill;	 /* the calling process gets SIGKILL */
	int32_t code;	 /* else: what the call returns */
	uint64_t nth, times;
	_Atomic uint64_t hits; /* calls seen since it was armed */
};

/* Ways in which one driver release differs from another; bits. */
enum variant {
	VARIANT_NVL = 1,	  /* 7g instances also offer compute profile 7_SLICE_NVL */
	VARIANT_NVL_SWAPPED = 2,  /* the profile ids of 7_SLICE and 7_SLICE_NVL are exchanged */
	VARIANT_CI_NAMES_GPU = 4, /* a compute instance's description names the GPU, not the MIG device */
	VARIANT_ALL = 7,
};

/* What happened to a GPU, for those who wait in an event set. */
struct event {
	uint64_t type, data; /* nvmlEventType*, for an Xid its number */
	uint32_t gpu;
};

struct machine_file {
	uint64_t magic;
	uint64_t bytes;
	uint32_t caps_major;
	uint32_t ampere_auto_reset;
	_Atomic uint64_t generation; /* body[generation & 1] is current */
	_Atomic uint64_t tree_dirty; /* TREE_*: what beside the state must be made again from it */
	_Atomic uint32_t variants;
	struct latency latency[OP_COUNT];
	_Atomic int64_t gi_stuck_until, ci_stuck_until; /* ns; destroy answers IN_USE until then */
	struct fault faults[MAX_FAULTS];
	_Atomic uint64_t events_posted; /* ever; the last MAX_EVENTS of them are kept */
	struct event events[MAX_EVENTS];
	_Atomic uint64_t calls[FN_COUNT];
	struct body body[2];
};

#define TREE_GPU(index) (UINT64_C(1) << (index))
#define TREE_BOOT (UINT64_C(1) << MAX_GPUS)
#define TREE_ALL UINT64_MAX

#define MACHINE_MAGIC 0x314d49534749u

struct machine {
	char dir[PATH_MAX - 256];
	struct machine_file *file;
	dev_t device;
	ino_t inode;
	int lock; /* descriptor that holds the flock; -1 */
};

/* 0 or a negative errno. */
int machine_attach(struct machine *machine, const char *dir);
void machine_detach(struct machine *machine);
int machine_lock(struct machine *machine, bool exclusive);
void machine_unlock(struct machine *machine);

const struct body *machine_body(const struct machine *machine);
/* The idle copy, filled with the current one; needs the exclusive lock. */
struct body *machine_shadow(struct machine *machine);
/* Makes the shadow the current copy and marks the parts of the tree in `dirty` as behind. */
void machine_commit(struct machine *machine, uint64_t dirty);

int64_t now_ns(void);
void random_uuid(uint8_t uuid[16], unsigned version);
#define UUID_TEXT 37
void uuid_text(const uint8_t uuid[16], char text[UUID_TEXT]);
bool uuid_parse(const char *text, uint8_t uuid[16]);

/* Instances at the moment `now`. */
bool gi_takes_place(const struct gi *gi, int64_t now);
bool gi_visible(const struct gi *gi, int64_t now);
bool ci_takes_place(const struct ci *ci, int64_t now);
bool ci_visible(const struct ci *ci, int64_t now);

static inline const struct model *gpu_model(const struct gpu *gpu)
{
	return &sim_models[gpu->model];
}

static inline const struct profile *gi_profile(const struct gpu *gpu, const struct gi *gi)
{
	return &gpu_model(gpu)->profiles[gi->profile];
}

/* All instances go, and what was set until a reset: reset, reboot. */
void gpu_clear(struct gpu *gpu);

#endif

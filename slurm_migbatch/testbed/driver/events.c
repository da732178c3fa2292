/* Event sets: who waits for what, and what has happened since. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <time.h>

#include "api.h"
#include "session.h"

#define EVENT_SINGLE_BIT_ECC 0x1ull
#define EVENT_DOUBLE_BIT_ECC 0x2ull
#define EVENT_PSTATE 0x4ull
#define EVENT_CLOCK 0x10ull
#define SUPPORTED (EVENT_SINGLE_BIT_ECC | EVENT_DOUBLE_BIT_ECC | EVENT_PSTATE | NVML_EVENT_XID | EVENT_CLOCK)
#define POLL_NS 5000000

/* Lives in the process that asked for it. */
struct event_set {
	struct event_set *next;
	uint64_t types[MAX_GPUS];
	uint64_t seen; /* how many of the machine's events */
};

static struct event_set *sets; /* under the session's mutex */

static struct event_set **find(const struct event_set *set)
{
	struct event_set **at = &sets;

	while (*at && *at != set)
		at = &(*at)->next;
	return at;
}

nvmlReturn_t event_set_create(struct call *call, nvmlEventSet_t *out)
{
	struct event_set *set;

	if (!out)
		return NVML_ERROR_INVALID_ARGUMENT;
	set = calloc(1, sizeof(*set));
	if (!set)
		return NVML_ERROR_MEMORY;
	set->seen = atomic_load(&call->machine->file->events_posted);
	set->next = sets;
	sets = set;
	*out = set;
	return NVML_SUCCESS;
}

nvmlReturn_t event_set_free(struct call *call, nvmlEventSet_t set)
{
	struct event_set **at = find(set);

	(void)call;
	if (!set || !*at)
		return NVML_ERROR_INVALID_ARGUMENT;
	*at = set->next;
	free(set);
	return NVML_SUCCESS;
}

nvmlReturn_t event_types(struct call *call, nvmlDevice_t device, unsigned long long *types)
{
	struct target t;

	TRY(resolve_gpu_for(call, device, types, &t));
	*types = SUPPORTED;
	return NVML_SUCCESS;
}

nvmlReturn_t event_register(struct call *call, nvmlDevice_t device, unsigned long long types, nvmlEventSet_t set)
{
	struct target t;

	TRY(resolve_gpu(call, device, &t));
	if (!set || !*find(set))
		return NVML_ERROR_INVALID_ARGUMENT;
	if (types & ~SUPPORTED)
		return NVML_ERROR_NOT_SUPPORTED;
	set->types[t.index] |= types;
	return NVML_SUCCESS;
}

/* Takes the next event that the set asked for; TIMEOUT where there is none yet. */
static nvmlReturn_t take(const struct call *call, nvmlEventSet_t set, nvmlEventData_v2_t *data)
{
	const struct machine_file *file = call->machine->file;
	uint64_t posted = atomic_load_explicit(&file->events_posted, memory_order_acquire);

	if (!data || !set || !*find(set))
		return NVML_ERROR_INVALID_ARGUMENT;
	if (set->seen > posted)
		set->seen = 0; /* another machine was attached */
	if (posted - set->seen > MAX_EVENTS)
		set->seen = posted - MAX_EVENTS; /* older ones are lost, as on hardware */
	while (set->seen < posted) {
		const struct event *event = &file->events[set->seen++ % MAX_EVENTS];

		if (!(set->types[event->gpu] & event->type))
			continue;
		*data = (nvmlEventData_v2_t){
			.device = handle_gpu(call, event->gpu),
			.eventType = event->type,
			.eventData = event->data,
			.gpuInstanceId = NVML_NO_INSTANCE,
			.computeInstanceId = NVML_NO_INSTANCE,
		};
		return NVML_SUCCESS;
	}
	return NVML_ERROR_TIMEOUT;
}

/* The first look is a call like any other; the wait holds no lock, so that other threads get on. */
static nvmlReturn_t wait_in(enum function function, nvmlEventSet_t set, nvmlEventData_v2_t *data, unsigned timeout_ms)
{
	int64_t deadline = now_ns() + (int64_t)timeout_ms * 1000000;
	struct call call;
	nvmlReturn_t result = call_enter(&call, function, READ);

	if (result == NVML_SUCCESS)
		result = take(&call, set, data);
	result = call_leave(&call, result);
	while (result == NVML_ERROR_TIMEOUT && now_ns() < deadline) {
		struct timespec pause = {.tv_nsec = POLL_NS};
		struct call look = {0};

		nanosleep(&pause, NULL);
		look.machine = session_enter();
		if (!look.machine)
			return NVML_ERROR_UNINITIALIZED;
		look.body = machine_body(look.machine);
		result = take(&look, set, data);
		session_leave();
	}
	return result;
}

EXPORT nvmlReturn_t nvmlEventSetWait(nvmlEventSet_t set, nvmlEventData_v1_t *data, unsigned timeout_ms);
EXPORT nvmlReturn_t nvmlEventSetWait_v2(nvmlEventSet_t set, nvmlEventData_v2_t *data, unsigned timeout_ms);

EXPORT nvmlReturn_t nvmlEventSetWait(nvmlEventSet_t set, nvmlEventData_v1_t *data, unsigned timeout_ms)
{
	nvmlEventData_v2_t v2;
	nvmlReturn_t result = wait_in(FN_nvmlEventSetWait, set, data ? &v2 : NULL, timeout_ms);

	if (result == NVML_SUCCESS)
		*data = (nvmlEventData_v1_t){v2.device, v2.eventType, v2.eventData};
	return result;
}

EXPORT nvmlReturn_t nvmlEventSetWait_v2(nvmlEventSet_t set, nvmlEventData_v2_t *data, unsigned timeout_ms)
{
	return wait_in(FN_nvmlEventSetWait_v2, set, data, timeout_ms);
}

/* The whole machine as JSON. All strings in it are plain ASCII of the driver's own making. */
#define _GNU_SOURCE
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "control.h"
#include "process.h"
#include "tree.h"

struct text {
	char *out;
	unsigned size, length;
};

static void put(struct text *text, const char *format, ...) __attribute__((format(printf, 2, 3)));

static void put(struct text *text, const char *format, ...)
{
	unsigned room = text->length < text->size ? text->size - text->length : 0;
	va_list args;
	int n;

	va_start(args, format);
	n = vsnprintf(text->out + (room ? text->length : 0), room, format, args);
	va_end(args);
	text->length += n > 0 ? (unsigned)n : 0;
}

static void put_uuid(struct text *text, const char *key, const char *prefix, const uint8_t uuid[16])
{
	char plain[UUID_TEXT];

	uuid_text(uuid, plain);
	put(text, "\"%s\":\"%s%s\"", key, prefix, plain);
}

static const char *phase(int64_t born, int64_t gone, int64_t now)
{
	return gone ? "destroying" : born > now ? "creating" : "live";
}

static void put_ci(struct text *text, const struct gpu *gpu, unsigned gi_id, unsigned ci_id, int64_t now)
{
	const struct gi *gi = &gpu->gi[gi_id];
	const struct profile *profile = gi_profile(gpu, gi);
	const struct ci *ci = &gi->ci[ci_id];
	struct ci_profile compute = {0};
	char name[48];

	ci_profile_get(gpu_model(gpu), profile, ci->profile, &compute);
	ci_profile_name(profile, &compute, name, sizeof(name));
	put(text,
	    "{\"ci_id\":%u,\"profile\":\"%s\",\"profile_id\":%u,\"start\":%u,\"size\":%u,\"cap_minor\":%u,"
	    "\"state\":\"%s\",",
	    ci_id, name, ci->profile, ci->start, ci->size, cap_minor_ci(gpu->minor, gi_id, ci_id),
	    phase(ci->born, ci->gone, now));
	put_uuid(text, "uuid", "MIG-", ci->uuid);
	put(text, "}");
}

static void put_gi(struct text *text, const struct gpu *gpu, unsigned gi_id, int64_t now)
{
	const struct gi *gi = &gpu->gi[gi_id];
	const char *comma = "";

	put(text,
	    "{\"gi_id\":%u,\"profile\":\"%s\",\"profile_id\":%u,\"start\":%u,\"size\":%u,\"cap_minor\":%u,"
	    "\"state\":\"%s\",\"compute_instances\":[",
	    gi_id, gi_profile(gpu, gi)->name, gi_profile(gpu, gi)->id, gi->start, gi->size,
	    cap_minor_gi(gpu->minor, gi_id), phase(gi->born, gi->gone, now));
	for (unsigned j = 0; j < MAX_CIS; j++)
		if (ci_takes_place(&gi->ci[j], now)) {
			put(text, "%s", comma);
			put_ci(text, gpu, gi_id, j, now);
			comma = ",";
		}
	put(text, "]}");
}

static void put_gpu(struct text *text, const struct gpu *gpu, unsigned index, int64_t now)
{
	const char *comma = "";

	put(text, "{\"index\":%u,\"minor\":%u,", index, gpu->minor);
	put_uuid(text, "uuid", "GPU-", gpu->uuid);
	put(text, ",\"model\":\"%s\",\"name\":\"%s\",\"mig\":%s,\"mig_pending\":%s,\"lost\":%s,\"instances\":[",
	    gpu_model(gpu)->key, gpu_model(gpu)->name, gpu->mig_current ? "true" : "false",
	    gpu->mig_pending ? "true" : "false", gpu->lost ? "true" : "false");
	for (unsigned i = 0; i < MAX_GIS; i++)
		if (gi_takes_place(&gpu->gi[i], now)) {
			put(text, "%s", comma);
			put_gi(text, gpu, i, now);
			comma = ",";
		}
	put(text, "]}");
}

static void put_process(struct text *text, const struct body *body, const struct process *process)
{
	const struct gpu *gpu = &body->gpus[process->gpu];

	put(text, "{\"pid\":%d,\"gpu\":%u,\"memory_mib\":%llu,\"sticky\":%s,", process->pid, process->gpu,
	    (unsigned long long)process->memory_mib, process->sticky ? "true" : "false");
	for (unsigned i = 0; i < MAX_GIS && process->ci_serial; i++)
		for (unsigned j = 0; j < MAX_CIS; j++)
			if (gpu->gi[i].serial && gpu->gi[i].ci[j].serial == process->ci_serial) {
				put(text, "\"gi_id\":%u,\"ci_id\":%u,", i, j);
				put_uuid(text, "uuid", "MIG-", gpu->gi[i].ci[j].uuid);
			}
	if (!process->ci_serial)
		put_uuid(text, "uuid", "GPU-", gpu->uuid);
	put(text, "}");
}

int migsim_dump(const char *dir, char *out, unsigned size)
{
	struct text text = {.out = out, .size = size};
	int64_t now = now_ns();
	const struct body *body;
	const char *comma = "";
	struct machine machine;
	int error = machine_attach(&machine, dir);

	if (error)
		return error;
	error = machine_lock(&machine, false);
	if (error) {
		machine_detach(&machine);
		return error;
	}
	body = machine_body(&machine);
	put(&text, "{");
	put_uuid(&text, "boot_id", "", body->boot_id);
	put(&text, ",\"boots\":%llu,\"caps_major\":%u,\"gpus\":[", (unsigned long long)body->boots,
	    machine.file->caps_major);
	for (unsigned g = 0; g < body->gpu_count; g++) {
		put(&text, "%s", g ? "," : "");
		put_gpu(&text, &body->gpus[g], g, now);
	}
	put(&text, "],\"processes\":[");
	for (unsigned i = 0; i < MAX_PROCESSES; i++)
		if (process_holds(&body->processes[i])) {
			put(&text, "%s", comma);
			put_process(&text, body, &body->processes[i]);
			comma = ",";
		}
	put(&text, "]}");
	machine_unlock(&machine);
	machine_detach(&machine);
	return (int)text.length;
}

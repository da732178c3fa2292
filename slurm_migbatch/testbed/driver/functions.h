/* One number per entry point, for call counters and faults. */
#ifndef SIM_FUNCTIONS_H
#define SIM_FUNCTIONS_H

enum function {
#define FN(name, ...) FN_##name,
#include "entry_points.h"
#undef FN
	FN_nvmlInit,
	FN_nvmlInit_v2,
	FN_nvmlInitWithFlags,
	FN_nvmlShutdown,
	FN_nvmlEventSetWait,
	FN_nvmlEventSetWait_v2,
	FN_COUNT
};

extern const char *const function_names[FN_COUNT];

/* -1 where no such function is served. */
int function_by_name(const char *name);

#endif

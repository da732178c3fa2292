/* Declarations of what entry_points.h maps the entry points to. */
#ifndef SIM_API_H
#define SIM_API_H

#include "call.h"

#define SIM_UNWRAP(...) __VA_ARGS__
#define FN(name, implementation, access, parameters, ...) \
	nvmlReturn_t implementation(struct call *call, SIM_UNWRAP parameters);
#include "entry_points.h"
#undef FN

#endif

/* Names of the entry points. */
#include "functions.h"

#include <string.h>

const char *const function_names[FN_COUNT] = {
#define FN(name, ...) #name,
#include "entry_points.h"
#undef FN
	"nvmlInit",
	"nvmlInit_v2",
	"nvmlInitWithFlags",
	"nvmlShutdown",
	"nvmlEventSetWait",
	"nvmlEventSetWait_v2",
};

int function_by_name(const char *name)
{
	for (int i = 0; i < FN_COUNT; i++)
		if (!strcmp(function_names[i], name))
			return i;
	return -1;
}

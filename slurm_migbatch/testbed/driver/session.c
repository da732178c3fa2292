/* nvmlInit, nvmlShutdown, and finding the machine.
 *
 * The machine is the directory that holds the loaded library file;
 * MIGBATCH_SIM_DIR, read at nvmlInit, names another one.
 */
#define _GNU_SOURCE
#include "session.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "call.h"

static struct {
	pthread_mutex_t mutex;
	unsigned users; /* nvmlInit minus nvmlShutdown */
	uint64_t boots; /* the boot that nvmlInit saw */
	struct machine machine;
} session = {.mutex = PTHREAD_MUTEX_INITIALIZER};

/* A fork waits for calls of other threads, so the child finds the mutex free and inherits no lock. */
static void fork_prepare(void)
{
	pthread_mutex_lock(&session.mutex);
}

static void fork_done(void)
{
	pthread_mutex_unlock(&session.mutex);
}

__attribute__((constructor)) static void watch_forks(void)
{
	pthread_atfork(fork_prepare, fork_done, fork_done);
}

struct machine *session_enter(void)
{
	pthread_mutex_lock(&session.mutex);
	if (session.users)
		return &session.machine;
	pthread_mutex_unlock(&session.mutex);
	return NULL;
}

void session_leave(void)
{
	pthread_mutex_unlock(&session.mutex);
}

bool session_current(const struct body *body)
{
	return session.boots == body->boots;
}

static bool find_directory(char dir[PATH_MAX])
{
	const char *named = secure_getenv("MIGBATCH_SIM_DIR");
	char *slash;
	Dl_info info;

	if (named && *named)
		return realpath(named, dir) != NULL;
	if (!dladdr(&session, &info) || !info.dli_fname || !realpath(info.dli_fname, dir))
		return false;
	slash = strrchr(dir, '/');
	*slash = '\0';
	return true;
}

/* Attaches to the machine, again where it was replaced or another one is named. */
static nvmlReturn_t attach(void)
{
	struct machine found = {0};
	char dir[PATH_MAX];

	if (!find_directory(dir) || machine_attach(&found, dir))
		return NVML_ERROR_DRIVER_NOT_LOADED;
	if (machine_lock(&found, false)) {
		machine_detach(&found);
		return NVML_ERROR_DRIVER_NOT_LOADED;
	}
	session.boots = machine_body(&found)->boots;
	machine_unlock(&found);
	machine_detach(&session.machine);
	session.machine = found;
	return NVML_SUCCESS;
}

/* True where the session cannot serve calls any more: first use, reboot, or the machine was made anew. */
static bool outdated(void)
{
	bool old;

	if (!session.users || machine_lock(&session.machine, false))
		return true;
	old = !session_current(machine_body(&session.machine));
	machine_unlock(&session.machine);
	return old;
}

static nvmlReturn_t start(enum function function)
{
	nvmlReturn_t result = NVML_SUCCESS;
	struct call call;

	pthread_mutex_lock(&session.mutex);
	if (outdated())
		result = attach();
	if (result == NVML_SUCCESS)
		session.users++;
	pthread_mutex_unlock(&session.mutex);
	if (result != NVML_SUCCESS)
		return result;
	/* counted and failed like any other call */
	result = call_leave(&call, call_enter(&call, function, READ));
	if (result != NVML_SUCCESS) {
		pthread_mutex_lock(&session.mutex);
		session.users--;
		pthread_mutex_unlock(&session.mutex);
	}
	return result;
}

EXPORT nvmlReturn_t nvmlInit(void);
EXPORT nvmlReturn_t nvmlInit_v2(void);
EXPORT nvmlReturn_t nvmlInitWithFlags(unsigned flags);
EXPORT nvmlReturn_t nvmlShutdown(void);

EXPORT nvmlReturn_t nvmlInit(void)
{
	return start(FN_nvmlInit);
}

EXPORT nvmlReturn_t nvmlInit_v2(void)
{
	return start(FN_nvmlInit_v2);
}

EXPORT nvmlReturn_t nvmlInitWithFlags(unsigned flags)
{
	(void)flags; /* "no GPUs is fine", "do not attach": both hold here anyway */
	return start(FN_nvmlInitWithFlags);
}

EXPORT nvmlReturn_t nvmlShutdown(void)
{
	struct call call;
	nvmlReturn_t result = call_enter(&call, FN_nvmlShutdown, READ);

	if (call.machine && (result == NVML_SUCCESS || result == NVML_ERROR_DRIVER_NOT_LOADED)) {
		session.users--; /* also after a reboot: the session ends either way */
		result = NVML_SUCCESS;
	}
	return call_leave(&call, result);
}

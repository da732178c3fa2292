/* Calls about the system as a whole. */
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "api.h"

#define DRIVER_VERSION "580.95.05"
#define CUDA_VERSION 13000

nvmlReturn_t system_driver_version(struct call *call, char *text, unsigned length)
{
	(void)call;
	return give_text(text, length, DRIVER_VERSION);
}

nvmlReturn_t system_nvml_version(struct call *call, char *text, unsigned length)
{
	(void)call;
	return give_text(text, length, "13." DRIVER_VERSION);
}

nvmlReturn_t system_cuda_version(struct call *call, int *version)
{
	(void)call;
	if (!version)
		return NVML_ERROR_INVALID_ARGUMENT;
	*version = CUDA_VERSION;
	return NVML_SUCCESS;
}

nvmlReturn_t system_process_name(struct call *call, unsigned pid, char *name, unsigned length)
{
	char path[64], line[1024];
	ssize_t n;
	int fd;

	(void)call;
	if (!name || !length)
		return NVML_ERROR_INVALID_ARGUMENT;
	snprintf(path, sizeof(path), "/proc/%u/cmdline", pid);
	fd = open(path, O_RDONLY | O_CLOEXEC);
	if (fd < 0)
		return NVML_ERROR_NOT_FOUND;
	n = read(fd, line, sizeof(line) - 1);
	close(fd);
	line[n > 0 ? n : 0] = '\0'; /* the first argument ends at its own zero byte */
	snprintf(name, length, "%s", line);
	return NVML_SUCCESS;
}

nvmlReturn_t device_count(struct call *call, unsigned *count)
{
	if (!count)
		return NVML_ERROR_INVALID_ARGUMENT;
	*count = call->body->gpu_count;
	return NVML_SUCCESS;
}

nvmlReturn_t unit_count(struct call *call, unsigned *count)
{
	(void)call;
	if (!count)
		return NVML_ERROR_INVALID_ARGUMENT;
	*count = 0;
	return NVML_SUCCESS;
}

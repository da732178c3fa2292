/* A SPANK plugin that treats tasks as pyxis (github.com/NVIDIA/pyxis) does, to test what runs in what order: before
 * TaskProlog, a program starts the container with part of the step's environment; the container's environment is added
 * to the task's, and the task enters its namespaces. Arguments in plugstack.conf: the program that starts a container,
 * its first argument. Option: --container-image=DIRECTORY, the second.
 *
 * The declarations are those of slurm/spank.h, without which this compiles for every release: -DRELEASE=0xMMmmpp. */

#define _GNU_SOURCE
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

typedef struct spank_handle *spank_t;
struct spank_option {
	char *name, *arginfo, *usage;
	int has_arg, val;
	int (*callback)(int val, const char *argument, int remote);
};
enum { JOB_ENVIRONMENT = 10 };
extern int spank_option_register(spank_t spank, struct spank_option *option);
extern int spank_get_item(spank_t spank, int item, ...);
extern int spank_setenv(spank_t spank, const char *name, const char *value, int overwrite);

const char plugin_name[] = "container", plugin_type[] = "spank";
const unsigned int plugin_version = RELEASE, spank_plugin_version = 1;

static char image[4096];
/* the last is passed on here only: the nodes of a test bed have one host name */
static const char *passed_on[] = {"HOME=", "NVIDIA_VISIBLE_DEVICES=", "SLURM_JOB_", "SLURM_STEP_", "SLURM_NODELIST=",
	"SLURM_NTASKS=", "SLURMD_NODENAME=", NULL};

static int set_image(int val, const char *argument, int remote)
{
	snprintf(image, sizeof(image), "%s", argument);
	return 0;
}

static struct spank_option option = {"container-image", "DIRECTORY", "root of the container", 1, 0, set_image};

int slurm_spank_init(spank_t spank, int argc, char **argv)
{
	return spank_option_register(spank, &option);
}

static void start(char **environment, char **argv)
{
	char *kept[1024], *words[] = {argv[0], argv[1], image, NULL};
	int n = 0;

	for (; *environment; environment++)
		for (const char **name = passed_on; *name; name++)
			if (n < 1022 && !strncmp(*environment, *name, strlen(*name)))
				kept[n++] = *environment;
	kept[n++] = "PATH=/usr/bin:/usr/sbin";
	kept[n] = NULL;
	execve(argv[0], words, kept);
	_exit(127);
}

static int open_file(pid_t pid, const char *name)
{
	char path[64];

	snprintf(path, sizeof(path), "/proc/%d/%s", pid, name);
	return open(path, O_RDONLY | O_CLOEXEC);
}

int slurm_spank_task_init(spank_t spank, int argc, char **argv)
{
	char **environment, text[65536];
	ssize_t length, done = 0;
	int status, user, mounts;
	pid_t pid;

	if (!image[0])
		return 0;
	if (argc < 2 || spank_get_item(spank, JOB_ENVIRONMENT, &environment))
		return -1;
	if ((pid = fork()) == 0)
		start(environment, argv);
	/* the container stops itself when it is ready */
	if (pid < 0 || waitpid(pid, &status, WUNTRACED) < 0 || !WIFSTOPPED(status))
		return -1;
	length = read(open_file(pid, "environ"), text, sizeof(text) - 1);
	while (done < length) {
		char *value = strchr(text + done, '=');
		ssize_t next = done + strlen(text + done) + 1;

		if (value) {
			*value++ = '\0';
			spank_setenv(spank, text + done, value, 1);
		}
		done = next;
	}
	user = open_file(pid, "ns/user");
	mounts = open_file(pid, "ns/mnt");
	if (setns(user, CLONE_NEWUSER) || setns(mounts, CLONE_NEWNS))
		return -1;
	return kill(pid, SIGCONT) || chdir("/");
}

/* SPDX-License-Identifier: Apache-2.0
 *
 * The process "margay ensemble socket" that carries framed sockets: how it is started, and how a socket is tied to it.
 * The program is not to notice: no child of its own that it could be told of, no descriptor that the process inherits.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <limits.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/auxv.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>

#include "internal.h"

#define STACK_BYTES 65536
#define USUAL_PATH "/usr/local/bin:/usr/bin:/bin"

extern char **environ;

/* What the process begins with. */
struct start {
	const char *path;
	char **words;
	char **environment;
	int socket;
	char *stacks; /* two, one behind the other */
	int error; /* why it could not be; else 0 */
};

/* The last step, in a process that has the memory of this one and nothing else. */
static int become(void *argument)
{
	struct start *start = argument;
	sigset_t none;
	int fd;

	sigemptyset(&none);
	setsid();
	/* As standard input, and not closed on exec: dup2 of a descriptor onto itself would change nothing. */
	fd = start->socket ? REAL(dup2)(start->socket, STDIN_FILENO) : REAL(fcntl)(STDIN_FILENO, F_SETFD, 0);
	if (fd >= 0 && (fd = open("/dev/null", O_WRONLY)) >= 0) {
		REAL(dup2)(fd, STDOUT_FILENO);
		REAL(dup2)(fd, STDERR_FILENO);
		syscall(SYS_close_range, STDERR_FILENO + 1, ~0U, 0);
		sigprocmask(SIG_SETMASK, &none, NULL);
		execve(start->path, start->words, start->environment);
	}
	start->error = errno;
	_exit(127);
}

/* A child that has a child and ends: so nobody but init is told of the end of the second one. */
static int step_between(void *argument)
{
	struct start *start = argument;

	if (clone(become, start->stacks + 2 * STACK_BYTES, CLONE_VM | CLONE_VFORK, start) < 0)
		start->error = errno;
	_exit(0);
}

/* Without a signal at its end the program hears nothing of the child, and its own waits do not find it. */
static int run(struct start *start)
{
	sigset_t all, before;
	int child, cancel;

	start->stacks = malloc(2 * STACK_BYTES);
	if (!start->stacks)
		return fail(ENOMEM, "no memory for a process");
	sigfillset(&all);
	pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &cancel);
	/* A handler of the program must not run with its memory in a child. */
	pthread_sigmask(SIG_SETMASK, &all, &before);
	child = clone(step_between, start->stacks + STACK_BYTES, CLONE_VM | CLONE_VFORK, start);
	if (child < 0)
		start->error = errno;
	else
		waitpid(child, NULL, __WCLONE);
	pthread_sigmask(SIG_SETMASK, &before, NULL);
	pthread_setcancelstate(cancel, NULL);
	free(start->stacks);
	if (start->error)
		return fail(start->error, "%s, which carries framed sockets, cannot be run: %s", start->path,
			    strerror(start->error));
	return 0;
}

/* Where the program margay is. The environment of a program with other rights than its user's is not asked. */
static int find_program(char path[PATH_MAX])
{
	const char *named = secure_getenv("MARGAY_PROGRAM"), *dirs = secure_getenv("PATH");

	if (named && strlen(named) < PATH_MAX) {
		strcpy(path, named);
		return 0;
	}
	for (dirs = dirs ? dirs : USUAL_PATH; *dirs;) {
		int length = (int)strcspn(dirs, ":");

		if (length && snprintf(path, PATH_MAX, "%.*s/margay", length, dirs) < PATH_MAX && !access(path, X_OK))
			return 0;
		dirs += length + (dirs[length] == ':');
	}
	return fail(ENOENT, "the program margay, which carries framed sockets, is not in PATH: install it, or name it in "
		    "MARGAY_PROGRAM");
}

/* What is preloaded into this program is not for that one. To be freed; NULL without memory. */
static char **environment_of(void)
{
	size_t count = 0, kept = 0;
	char **copy;

	while (environ && environ[count])
		count++;
	copy = calloc(count + 1, sizeof(*copy));
	for (size_t at = 0; copy && at < count && !getauxval(AT_SECURE); at++) {
		if (strncmp(environ[at], "LD_PRELOAD=", 11))
			copy[kept++] = environ[at];
	}
	return copy;
}

/* Ties the socket to another one, which is given: it stays the descriptor that it is, with its copies. */
static int tie(int fd)
{
	struct sockaddr_un place = { .sun_family = AF_UNIX };
	socklen_t length = sizeof(sa_family_t);
	int meeting = REAL(socket)(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0), other = -1, error;

	/* At a place that the kernel chooses. Any process of the host may connect there, so that who has is looked at. */
	if (meeting >= 0 && !REAL(bind)(meeting, (struct sockaddr *)&place, length) && !REAL(listen)(meeting, 8)) {
		length = sizeof(place);
		if (!REAL(getsockname)(meeting, (struct sockaddr *)&place, &length) &&
		    !REAL(connect)(fd, (struct sockaddr *)&place, length)) {
			struct ucred who = { 0 };

			do {
				if (other >= 0)
					REAL(close)(other);
				other = REAL(accept4)(meeting, NULL, NULL, SOCK_CLOEXEC);
				length = sizeof(who);
			} while (other >= 0 &&
				 (getsockopt(other, SOL_SOCKET, SO_PEERCRED, &who, &length) || who.pid != getpid()));
		}
	}
	error = errno;
	if (meeting >= 0)
		REAL(close)(meeting);
	errno = error;
	return other;
}

int carrier_start(int fd, const char *verb, const char *name, const char *label)
{
	char path[PATH_MAX];
	/* Behind "--" a name is a name, whatever it looks like. execve changes none of the words. */
	char *words[] = { "margay", "ensemble", "socket", (char *)verb, "--as", (char *)label, "--", (char *)name, NULL };
	struct start start = { .path = path, .words = words };
	int result;

	if (find_program(path))
		return -1;
	start.environment = environment_of();
	if (!start.environment)
		return fail(ENOMEM, "no memory for a process");
	start.socket = tie(fd);
	if (start.socket < 0) {
		free(start.environment);
		return -1;
	}
	result = run(&start);
	free(start.environment);
	REAL(close)(start.socket);
	return result;
}

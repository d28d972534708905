/* SPDX-License-Identifier: Apache-2.0
 *
 * Errors in words, and locks that forks, signals and cancellation leave whole.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include "internal.h"

static _Thread_local char error_text[1200];

const char *sv_strerror(void)
{
	return error_text;
}

void forget_error(void)
{
	error_text[0] = '\0';
}

int fail(int error, const char *format, ...)
{
	va_list arguments;

	va_start(arguments, format);
	vsnprintf(error_text, sizeof(error_text), format, arguments);
	va_end(arguments);
	/* Not in a program that has more rights than who started it. */
	if (secure_getenv("MARGAY_ERRORS"))
		dprintf(STDERR_FILENO, "margay: %s\n", error_text);
	errno = error;
	return -1;
}

/* In the order in which they are taken. */
pthread_mutex_t state_lock = PTHREAD_MUTEX_INITIALIZER;
pthread_mutex_t agent_lock = PTHREAD_MUTEX_INITIALIZER;
pthread_mutex_t table_lock = PTHREAD_MUTEX_INITIALIZER;

static void before_fork(void)
{
	pthread_mutex_lock(&state_lock);
	pthread_mutex_lock(&agent_lock);
	pthread_mutex_lock(&table_lock);
}

static void after_fork(void)
{
	pthread_mutex_unlock(&table_lock);
	pthread_mutex_unlock(&agent_lock);
	pthread_mutex_unlock(&state_lock);
}

static void after_fork_in_child(void)
{
	agent_forget();
	table_adopt();
	after_fork();
}

/* No thread of the child holds a lock that another one of the parent held. */
__attribute__((constructor)) static void prepare_for_forks(void)
{
	table_adopt();
	pthread_atfork(before_fork, after_fork, after_fork_in_child);
}

void section_enter(struct section *section, pthread_mutex_t *lock)
{
	sigset_t all;

	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &section->signals);
	pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &section->cancel);
	pthread_mutex_lock(lock);
}

void section_leave(const struct section *section, pthread_mutex_t *lock)
{
	int before = errno;

	pthread_mutex_unlock(lock);
	pthread_setcancelstate(section->cancel, NULL);
	pthread_sigmask(SIG_SETMASK, &section->signals, NULL);
	errno = before;
}

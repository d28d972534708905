/* SPDX-License-Identifier: Apache-2.0
 *
 * The shim: the calls under their own names, for programs that are run with LD_PRELOAD.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdarg.h>
#include <stdlib.h>
#include <unistd.h>

#include "internal.h"

#define EXPORT __attribute__((visibility("default")))

/* The C library declares some addresses as a union of all kinds of them. */
#define AS_SOCKADDR(address) ((address).__sockaddr__)

static struct real real;
static pthread_once_t real_once = PTHREAD_ONCE_INIT;

static void find_real(void)
{
#define FIND(call)                                                 \
	do {                                                       \
		*(void **)&real.call = dlsym(RTLD_NEXT, #call); \
		if (!real.call)                                    \
			abort();                                   \
	} while (0)
	FIND(socket);
	FIND(bind);
	FIND(listen);
	FIND(connect);
	FIND(accept4);
	FIND(sendto);
	FIND(recvfrom);
	FIND(sendmsg);
	FIND(recvmsg);
	FIND(getsockname);
	FIND(getpeername);
	FIND(close);
	FIND(dup);
	FIND(dup2);
	FIND(dup3);
	FIND(fcntl);
#undef FIND
}

const struct real *real_calls(void)
{
	pthread_once(&real_once, find_real);
	return &real;
}

/* Before any signal handler could be the first to ask. */
__attribute__((constructor)) static void find_early(void)
{
	real_calls();
}

EXPORT int socket(int domain, int type, int protocol)
{
	return sv_socket(domain, type, protocol);
}

EXPORT int bind(int fd, __CONST_SOCKADDR_ARG address, socklen_t length)
{
	return sv_bind(fd, AS_SOCKADDR(address), length);
}

EXPORT int listen(int fd, int backlog)
{
	return sv_listen(fd, backlog);
}

EXPORT int connect(int fd, __CONST_SOCKADDR_ARG address, socklen_t length)
{
	return sv_connect(fd, AS_SOCKADDR(address), length);
}

EXPORT int accept(int fd, __SOCKADDR_ARG address, socklen_t *restrict length)
{
	return sv_accept4(fd, AS_SOCKADDR(address), length, 0);
}

EXPORT int accept4(int fd, __SOCKADDR_ARG address, socklen_t *restrict length, int flags)
{
	return sv_accept4(fd, AS_SOCKADDR(address), length, flags);
}

EXPORT ssize_t sendto(int fd, const void *data, size_t length, int flags, __CONST_SOCKADDR_ARG address, socklen_t size)
{
	return sv_sendto(fd, data, length, flags, AS_SOCKADDR(address), size);
}

EXPORT ssize_t recvfrom(int fd, void *restrict data, size_t length, int flags, __SOCKADDR_ARG address,
			socklen_t *restrict size)
{
	return sv_recvfrom(fd, data, length, flags, AS_SOCKADDR(address), size);
}

/* As programs call it that were compiled with _FORTIFY_SOURCE. */
EXPORT ssize_t __recvfrom_chk(int fd, void *data, size_t length, size_t room, int flags, struct sockaddr *address,
			      socklen_t *size)
{
	if (length > room)
		abort();
	return sv_recvfrom(fd, data, length, flags, address, size);
}

EXPORT ssize_t sendmsg(int fd, const struct msghdr *message, int flags)
{
	return sv_sendmsg(fd, message, flags);
}

EXPORT ssize_t recvmsg(int fd, struct msghdr *message, int flags)
{
	return sv_recvmsg(fd, message, flags);
}

EXPORT int getsockname(int fd, __SOCKADDR_ARG address, socklen_t *restrict length)
{
	return sv_getsockname(fd, AS_SOCKADDR(address), length);
}

EXPORT int getpeername(int fd, __SOCKADDR_ARG address, socklen_t *restrict length)
{
	return sv_getpeername(fd, AS_SOCKADDR(address), length);
}

EXPORT int close(int fd)
{
	return sv_close(fd);
}

EXPORT int dup(int fd)
{
	return sv_dup(fd);
}

EXPORT int dup2(int fd, int to)
{
	return sv_dup2(fd, to);
}

EXPORT int dup3(int fd, int to, int flags)
{
	int copy = real_calls()->dup3(fd, to, flags);

	if (copy >= 0)
		sock_copy(fd, copy);
	return copy;
}

static int copy_or_pass(int fd, int command, void *argument)
{
	int result = real_calls()->fcntl(fd, command, argument);

	if (result >= 0 && (command == F_DUPFD || command == F_DUPFD_CLOEXEC))
		sock_copy(fd, result);
	return result;
}

/* Whatever the argument is, it fits a pointer, and is passed on as it came. */
EXPORT int fcntl(int fd, int command, ...)
{
	va_list arguments;
	void *argument;

	va_start(arguments, command);
	argument = va_arg(arguments, void *);
	va_end(arguments);
	return copy_or_pass(fd, command, argument);
}

EXPORT int fcntl64(int fd, int command, ...) __attribute__((alias("fcntl")));

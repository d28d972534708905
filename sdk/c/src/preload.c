/* SPDX-License-Identifier: Apache-2.0
 *
 * The shim: the calls under their own names, for programs that are run with LD_PRELOAD.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <linux/close_range.h>
#include <stdarg.h>
#include <stdlib.h>
#include <sys/syscall.h>
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
	FIND(recvmmsg);
	FIND(sendmmsg);
	FIND(getsockname);
	FIND(getpeername);
	FIND(close);
	FIND(dup);
	FIND(dup2);
	FIND(dup3);
	FIND(fcntl);
	FIND(recv);
	FIND(send);
	FIND(read);
	FIND(write);
	FIND(readv);
	FIND(writev);
	FIND(sendfile);
	FIND(splice);
#undef FIND
	/* Not of every C library. */
	*(void **)&real.preadv2 = dlsym(RTLD_NEXT, "preadv2");
	*(void **)&real.pwritev2 = dlsym(RTLD_NEXT, "pwritev2");
	*(void **)&real.closefrom = dlsym(RTLD_NEXT, "closefrom");
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
	relay_start();
}

/* What a call has taken or given, noted. */
static ssize_t noted_read(struct end *end, ssize_t got)
{
	relay_read(end, got);
	return got;
}

/* What was only looked at is there still, and what comes from the queue of errors was sent before. */
static ssize_t noted_receive(struct end *end, int flags, ssize_t got)
{
	if (!(flags & (MSG_PEEK | MSG_ERRQUEUE)))
		return noted_read(end, got);
	relay_end(end);
	return got;
}

static ssize_t noted_write(struct end *end, size_t wanted, ssize_t done)
{
	relay_written(end, wanted, done);
	return done;
}

static size_t length_of(const struct iovec *parts, size_t count)
{
	size_t length = 0;

	for (size_t at = 0; at < count; at++)
		length += parts[at].iov_len;
	return length;
}

static int noted_accept(int fd)
{
	if (fd >= 0)
		relay_accepted(fd);
	return fd;
}

EXPORT int socket(int domain, int type, int protocol)
{
	int fd = sv_socket(domain, type, protocol);

	if (fd >= 0)
		relay_forget(fd);
	return fd;
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
	return noted_accept(sv_accept4(fd, AS_SOCKADDR(address), length, 0));
}

EXPORT int accept4(int fd, __SOCKADDR_ARG address, socklen_t *restrict length, int flags)
{
	return noted_accept(sv_accept4(fd, AS_SOCKADDR(address), length, flags));
}

EXPORT ssize_t sendto(int fd, const void *data, size_t length, int flags, __CONST_SOCKADDR_ARG address, socklen_t size)
{
	struct end *end = relay_begin(fd);

	return noted_write(end, length, sv_sendto(fd, data, length, flags, AS_SOCKADDR(address), size));
}

EXPORT ssize_t recvfrom(int fd, void *restrict data, size_t length, int flags, __SOCKADDR_ARG address,
			socklen_t *restrict size)
{
	struct end *end = relay_begin(fd);

	return noted_receive(end, flags, sv_recvfrom(fd, data, length, flags, AS_SOCKADDR(address), size));
}

/* As programs call it that were compiled with _FORTIFY_SOURCE. */
EXPORT ssize_t __recvfrom_chk(int fd, void *data, size_t length, size_t room, int flags, struct sockaddr *address,
			      socklen_t *size)
{
	struct end *end;

	if (length > room)
		abort();
	end = relay_begin(fd);
	return noted_receive(end, flags, sv_recvfrom(fd, data, length, flags, address, size));
}

EXPORT ssize_t sendmsg(int fd, const struct msghdr *message, int flags)
{
	struct end *end = relay_begin(fd);

	return noted_write(end, length_of(message->msg_iov, message->msg_iovlen), sv_sendmsg(fd, message, flags));
}

EXPORT ssize_t recvmsg(int fd, struct msghdr *message, int flags)
{
	struct end *end = relay_begin(fd);

	return noted_receive(end, flags, sv_recvmsg(fd, message, flags));
}

EXPORT int recvmmsg(int fd, struct mmsghdr *messages, unsigned int count, int flags, struct timespec *limit)
{
	struct end *end = relay_begin(fd);
	int got = real_calls()->recvmmsg(fd, messages, count, flags, limit);
	ssize_t bytes = 0;

	for (int at = 0; at < got; at++)
		bytes += messages[at].msg_len;
	noted_receive(end, flags, bytes);
	return got;
}

EXPORT int sendmmsg(int fd, struct mmsghdr *messages, unsigned int count, int flags)
{
	struct end *end = relay_begin(fd);
	int sent = real_calls()->sendmmsg(fd, messages, count, flags);
	ssize_t bytes = sent < 0 ? -1 : 0;
	size_t wanted = 0;

	for (unsigned int at = 0; end && at < count; at++)
		wanted += length_of(messages[at].msg_hdr.msg_iov, messages[at].msg_hdr.msg_iovlen);
	for (int at = 0; at < sent; at++)
		bytes += messages[at].msg_len;
	noted_write(end, wanted, bytes);
	return sent;
}

EXPORT ssize_t recv(int fd, void *data, size_t length, int flags)
{
	struct sock *framed = frames_get(fd);
	struct end *end;

	if (framed) {
		sock_put(framed);
		return sv_recv(fd, data, length, flags);
	}
	end = relay_begin(fd);
	return noted_receive(end, flags, real_calls()->recv(fd, data, length, flags));
}

EXPORT ssize_t __recv_chk(int fd, void *data, size_t length, size_t room, int flags)
{
	if (length > room)
		abort();
	return recv(fd, data, length, flags);
}

EXPORT ssize_t send(int fd, const void *data, size_t length, int flags)
{
	struct sock *framed = frames_get(fd);
	struct end *end;

	if (framed) {
		sock_put(framed);
		return sv_send(fd, data, length, flags);
	}
	end = relay_begin(fd);
	return noted_write(end, length, real_calls()->send(fd, data, length, flags));
}

EXPORT ssize_t read(int fd, void *data, size_t length)
{
	struct sock *framed = frames_get(fd);
	struct end *end;

	if (framed) {
		sock_put(framed);
		return sv_recv(fd, data, length, 0);
	}
	end = relay_begin(fd);
	return noted_read(end, real_calls()->read(fd, data, length));
}

EXPORT ssize_t __read_chk(int fd, void *data, size_t length, size_t room)
{
	if (length > room)
		abort();
	return read(fd, data, length);
}

EXPORT ssize_t write(int fd, const void *data, size_t length)
{
	struct sock *framed = frames_get(fd);
	struct end *end;

	if (framed) {
		sock_put(framed);
		return sv_send(fd, data, length, 0);
	}
	end = relay_begin(fd);
	return noted_write(end, length, real_calls()->write(fd, data, length));
}

EXPORT ssize_t readv(int fd, const struct iovec *parts, int count)
{
	struct msghdr message = { .msg_iov = (struct iovec *)parts, .msg_iovlen = (size_t)count };
	struct sock *framed = frames_get(fd);
	struct end *end;

	if (framed) {
		sock_put(framed);
		return sv_recvmsg(fd, &message, 0);
	}
	end = relay_begin(fd);
	return noted_read(end, real_calls()->readv(fd, parts, count));
}

EXPORT ssize_t writev(int fd, const struct iovec *parts, int count)
{
	struct msghdr message = { .msg_iov = (struct iovec *)parts, .msg_iovlen = (size_t)count };
	struct sock *framed = frames_get(fd);
	struct end *end;

	if (framed) {
		sock_put(framed);
		return sv_sendmsg(fd, &message, 0);
	}
	end = relay_begin(fd);
	return noted_write(end, length_of(parts, (size_t)count), real_calls()->writev(fd, parts, count));
}

/* Of a socket it reads as readv does. */
EXPORT ssize_t preadv2(int fd, const struct iovec *parts, int count, off64_t at, int flags)
{
	struct end *end;

	if (!real_calls()->preadv2) {
		errno = ENOSYS;
		return -1;
	}
	end = relay_begin(fd);
	return noted_read(end, real_calls()->preadv2(fd, parts, count, at, flags));
}

EXPORT ssize_t preadv64v2(int fd, const struct iovec *parts, int count, off64_t at, int flags)
	__attribute__((alias("preadv2")));

EXPORT ssize_t pwritev2(int fd, const struct iovec *parts, int count, off64_t at, int flags)
{
	struct end *end;

	if (!real_calls()->pwritev2) {
		errno = ENOSYS;
		return -1;
	}
	end = relay_begin(fd);
	return noted_write(end, length_of(parts, (size_t)count), real_calls()->pwritev2(fd, parts, count, at, flags));
}

EXPORT ssize_t pwritev64v2(int fd, const struct iovec *parts, int count, off64_t at, int flags)
	__attribute__((alias("pwritev2")));

/* What comes of a pipe, or goes into one, is spliced; of a file it is written. */
EXPORT ssize_t sendfile(int to, int from, off_t *at, size_t length)
{
	struct end *from_end = relay_begin(from), *to_end = relay_begin(to);
	ssize_t moved = real_calls()->sendfile(to, from, at, length);

	relay_file_sent(from_end, to_end, from, to, moved);
	return moved;
}

EXPORT ssize_t sendfile64(int to, int from, off_t *at, size_t length) __attribute__((alias("sendfile")));

EXPORT ssize_t splice(int from, off64_t *from_at, int to, off64_t *to_at, size_t length, unsigned int flags)
{
	struct end *from_end = relay_begin(from), *to_end = relay_begin(to);
	ssize_t moved = real_calls()->splice(from, from_at, to, to_at, length, flags);

	relay_spliced(from_end, to_end, from, to, moved);
	return moved;
}

EXPORT int getsockname(int fd, __SOCKADDR_ARG address, socklen_t *restrict length)
{
	return sv_getsockname(fd, AS_SOCKADDR(address), length);
}

EXPORT int getpeername(int fd, __SOCKADDR_ARG address, socklen_t *restrict length)
{
	return sv_getpeername(fd, AS_SOCKADDR(address), length);
}

/* Its number may mean another socket at once: not while the agent is asked about this one. */
EXPORT int close(int fd)
{
	struct end *end = relay_begin(fd);
	int result;

	relay_forget(fd);
	result = sv_close(fd);
	relay_end(end);
	return result;
}

EXPORT int close_range(unsigned int first, unsigned int last, int flags)
{
	if (!(flags & CLOSE_RANGE_CLOEXEC))
		relay_forget_all(first, last);
	return (int)syscall(SYS_close_range, first, last, flags);
}

/* The C library's own does without the system call where that is refused. */
EXPORT void closefrom(int first)
{
	relay_forget_all(first > 0 ? (unsigned int)first : 0, ~0U);
	if (real_calls()->closefrom)
		real_calls()->closefrom(first);
	else
		syscall(SYS_close_range, first > 0 ? first : 0, ~0U, 0);
}

/* A descriptor that is a copy of another one, or -1: it is no socket of before any more. */
static int noted_copy(int from, int copy)
{
	if (copy >= 0 && copy != from)
		relay_forget(copy);
	return copy;
}

EXPORT int dup(int fd)
{
	return noted_copy(fd, sv_dup(fd));
}

EXPORT int dup2(int fd, int to)
{
	struct end *end = relay_begin(to);
	int copy = noted_copy(fd, sv_dup2(fd, to));

	relay_end(end);
	return copy;
}

EXPORT int dup3(int fd, int to, int flags)
{
	struct end *end = relay_begin(to);
	int copy = real_calls()->dup3(fd, to, flags);

	if (copy >= 0)
		sock_copy(fd, copy);
	copy = noted_copy(fd, copy);
	relay_end(end);
	return copy;
}

static int copy_or_pass(int fd, int command, void *argument)
{
	int result = real_calls()->fcntl(fd, command, argument);

	if (result >= 0 && (command == F_DUPFD || command == F_DUPFD_CLOEXEC)) {
		sock_copy(fd, result);
		noted_copy(fd, result);
	}
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

/* SPDX-License-Identifier: Apache-2.0
 *
 * The library against an agent of a few lines: the bytes of requests, errors in words, and what programs do to their
 * descriptors.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <pthread.h>
#include <semaphore.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include "margay.h"

#define CHECK(that)                                                                                                \
	do {                                                                                                       \
		if (!(that)) {                                                                                     \
			fprintf(stderr, "%s:%d: %s (errno: %s; %s)\n", __func__, __LINE__, #that, strerror(errno), \
				sv_strerror());                                                                    \
			exit(1);                                                                                   \
		}                                                                                                  \
	} while (0)

enum { NAME = 1, RESOLVE, BIND, SOURCE, PEER, LOAD = 15, NEXT };

static char path[108];
static int listener;
static atomic_int connections, refuse_with, asked_for[17];
static atomic_bool hang_up_next, hold_next;
/* The agent has a question that it does not answer yet; it may; a signal was handled. */
static sem_t held, go, handled;
/* The last request, and the inode of the socket that came with it. */
static unsigned char asked[400];
static ssize_t asked_length;
static ino_t passed_inode;

static int receive(int connection, unsigned char bytes[sizeof(asked)])
{
	union {
		struct cmsghdr header;
		char space[CMSG_SPACE(sizeof(int))];
	} control;
	struct iovec part = { bytes, sizeof(asked) };
	struct msghdr message = { .msg_iov = &part, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof(control) };
	struct stat about;
	ssize_t length = recvmsg(connection, &message, 0);
	int fd;

	memcpy(asked, bytes, sizeof(asked));
	asked_length = length;
	passed_inode = 0;
	if (length > 0 && CMSG_FIRSTHDR(&message)) {
		memcpy(&fd, CMSG_DATA(CMSG_FIRSTHDR(&message)), sizeof(fd));
		if (!fstat(fd, &about))
			passed_inode = about.st_ino;
		close(fd);
	}
	return length < 0 || atomic_exchange(&hang_up_next, false) ? 0 : (int)length;
}

static void *serve(void *argument)
{
	int connection = (int)(intptr_t)argument, got;
	unsigned char bytes[sizeof(asked)] = { 0 };

	while ((got = receive(connection, bytes))) {
		unsigned char reply[300] = { 1, bytes[1], 0, (unsigned char)refuse_with, 1, 0 };
		size_t length = 60;

		asked_for[bytes[1] % 17]++;
		memcpy(reply + 8, bytes + 8, 32);
		if (refuse_with)
			length += (size_t)sprintf((char *)reply + 60, "because");
		else if (bytes[1] == NAME)
			length += (size_t)sprintf((char *)reply + 60, "%.*s", got - 56, bytes + 56);
		if (bytes[1] == NAME)
			reply[8] = 0xab;
		if (bytes[1] == SOURCE && !bytes[8])
			reply[8] = 0x77;
		if (atomic_exchange(&hold_next, false)) {
			sem_post(&held);
			sem_wait(&go);
		}
		send(connection, reply, length, MSG_NOSIGNAL);
	}
	close(connection);
	return NULL;
}

static void *accept_all(void *unused)
{
	pthread_t thread;
	int connection;

	(void)unused;
	while ((connection = accept(listener, NULL, NULL)) >= 0) {
		connections++;
		pthread_create(&thread, NULL, serve, (void *)(intptr_t)connection);
		pthread_detach(thread);
	}
	return NULL;
}

static void start_agent(void)
{
	struct sockaddr_un address = { .sun_family = AF_UNIX };
	pthread_t thread;

	strcpy(address.sun_path, path);
	listener = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
	CHECK(!bind(listener, (struct sockaddr *)&address, sizeof(address)) && !listen(listener, 16));
	CHECK(!pthread_create(&thread, NULL, accept_all, NULL));
}

static struct sockaddr_sv some(unsigned char first, unsigned char bits)
{
	struct sockaddr_sv address = { .sv_family = AF_SERVAL, .sv_prefix_bits = bits };

	address.sv_srvid.s_sid[0] = first;
	return address;
}

#define AS(address) ((struct sockaddr *)&(address)), sizeof(address)

static void without_agent(void)
{
	struct sockaddr_sv name = some(1, 0);
	int s = sv_socket(PF_SERVAL, SOCK_STREAM, 0);

	CHECK(sizeof(name) == 36 && offsetof(struct sockaddr_sv, sv_srvid) == 4 && offsetof(struct sockaddr_sv, sv_prefix_bits) == 3);
	CHECK(s >= 0);
	CHECK(sv_bind(s, AS(name)) == -1 && errno == ENETDOWN && strstr(sv_strerror(), "margay up"));
	CHECK(sv_connect(s, AS(name)) == -1 && errno == ENETDOWN && strstr(sv_strerror(), path));
	CHECK(!sv_close(s) && !*sv_strerror());
}

static void misuse(void)
{
	struct sockaddr_in v4 = { .sin_family = AF_INET };
	struct sockaddr_sv name = some(1, 0);
	int s = sv_socket(PF_SERVAL, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);

	CHECK(s >= 0 && fcntl(s, F_GETFD) == FD_CLOEXEC && fcntl(s, F_GETFL) & O_NONBLOCK);
	CHECK(sv_bind(s, (struct sockaddr *)&name, sizeof(name) - 1) == -1 && errno == EINVAL);
	CHECK(sv_bind(s, AS(v4)) == -1 && errno == EINVAL);
	name.sv_family = AF_INET;
	CHECK(sv_bind(s, AS(name)) == -1 && errno == EAFNOSUPPORT);
	CHECK(sv_listen(s, 1) == -1 && errno == EDESTADDRREQ);
	CHECK(sv_socket(PF_SERVAL, SOCK_RAW, 0) == -1 && errno == ESOCKTNOSUPPORT);
	CHECK(sv_socket(PF_SERVAL, SOCK_DGRAM, IPPROTO_TCP) == -1 && errno == EPROTONOSUPPORT);
	CHECK(!sv_close(s) && sv_close(s) == -1 && errno == EBADF);
}

static void names(void)
{
	struct sockaddr_sv name, prefix = some(0xcd, 9);
	char text[SV_STRLEN];

	CHECK(!sv_name("web.shop", &name));
	CHECK(asked_length == 64 && asked[0] == 1 && asked[1] == NAME && !memcmp(asked + 56, "web.shop", 8));
	CHECK(name.sv_family == AF_SERVAL && name.sv_prefix_bits == 0 && name.sv_srvid.s_sid[0] == 0xab);
	CHECK(!strcmp(sv_ntop(&name, text, sizeof(text)), "web.shop"));
	CHECK(!strncmp(sv_ntop(&prefix, text, sizeof(text)), "sid:cd00", 8) && !strcmp(text + 68, "/9"));
	CHECK(!sv_ntop(&prefix, text, 20) && errno == ENOSPC);
	refuse_with = EINVAL;
	CHECK(sv_name("web", &name) == -1 && errno == EINVAL && !strcmp(sv_strerror(), "because"));
	refuse_with = 0;
}

static ino_t inode_of(int fd)
{
	struct stat about;

	return fstat(fd, &about) ? 0 : about.st_ino;
}

static void a_bound_socket(void)
{
	struct sockaddr_sv name = some(0xab, 100), other = some(0xab, 0), got;
	socklen_t length = sizeof(got), none = 0;
	int s = sv_socket(PF_SERVAL, SOCK_STREAM, IPPROTO_TCP), copy;

	refuse_with = EACCES;
	CHECK(sv_bind(s, AS(name)) == -1 && errno == EACCES);
	refuse_with = 0;
	CHECK(!sv_bind(s, AS(name)) && sv_bind(s, AS(other)) == -1 && errno == EINVAL);
	CHECK(asked[1] == BIND && asked[2] == IPPROTO_TCP && asked[6] == 0 && asked[7] == 100 && asked[8] == 0xab);
	CHECK(asked_length == 56 && passed_inode == inode_of(s));
	copy = sv_dup(s);
	CHECK(!sv_close(s) && sv_getsockname(s, (struct sockaddr *)&got, &length) == -1 && errno == EBADF);
	CHECK(!sv_getsockname(copy, (struct sockaddr *)&got, &length) && length == sizeof(got) && !memcmp(&got, &name, sizeof(got)));
	CHECK(!sv_getsockname(copy, (struct sockaddr *)&got, &none) && none == sizeof(got));
	asked[1] = 0;
	CHECK(!sv_listen(copy, 1) && asked[1] == BIND);
	CHECK(sv_getpeername(copy, (struct sockaddr *)&got, &length) == -1 && errno == ENOTCONN);
	CHECK(!sv_close(copy));
	/* The written name goes with the bits that it was looked up for. */
	s = sv_socket(PF_SERVAL, SOCK_DGRAM, 0);
	CHECK(!sv_bind(s, AS(other)) && asked[2] == IPPROTO_UDP && asked[6] == 1 && !memcmp(asked + 56, "web.shop", 8));
	CHECK(!sv_close(s));
}

static void descriptors_that_changed_hands(void)
{
	struct sockaddr_sv name = some(0xab, 0);
	struct sockaddr_in plain;
	socklen_t length = sizeof(plain);
	int s = sv_socket(PF_SERVAL, SOCK_DGRAM, 0), again, pipes[2], before = connections;
	char byte;

	/* Behind the library's back. */
	syscall(SYS_close, s);
	again = socket(AF_INET, SOCK_DGRAM, 0);
	CHECK(again == s && !sv_getsockname(again, (struct sockaddr *)&plain, &length) && plain.sin_family == AF_INET);
	close(again);
	/* The connection to the agent, too: its number is a pipe's now. */
	CHECK(!pipe2(pipes, O_NONBLOCK));
	for (int fd = 500; fd < 600; fd++)
		if (fcntl(fd, F_GETFD) >= 0)
			dup2(pipes[1], fd);
	CHECK(!sv_name("web.shop", &name) && connections == before + 1);
	CHECK(read(pipes[0], &byte, 1) == -1 && errno == EAGAIN);
	for (int fd = 500; fd < 600; fd++)
		if (inode_of(fd) == inode_of(pipes[1]))
			close(fd);
	close(pipes[0]);
	close(pipes[1]);
}

static void forks_and_restarts(void)
{
	int before = connections, status;
	struct sockaddr_sv name;
	pid_t child;

	CHECK(!sv_name("web.shop", &name) && connections == before);
	child = fork();
	if (!child)
		_exit(sv_name("web.shop", &name) || sv_name("adm.shop", &name));
	CHECK(waitpid(child, &status, 0) == child && status == 0 && connections == before + 1);
	CHECK(!sv_name("web.shop", &name) && connections == before + 1);
	hang_up_next = true;
	CHECK(!sv_name("web.shop", &name) && connections == before + 2);
}

static void a_named_socket(void)
{
	struct sockaddr_sv one = some(1, 0), other = some(2, 0), own, again;
	socklen_t length = sizeof(own);
	int s = sv_socket(PF_SERVAL, SOCK_DGRAM, 0), before = asked_for[SOURCE];

	/* This agent gives no address that a datagram could be sent to. */
	sv_sendto(s, "x", 1, 0, AS(one));
	sv_sendto(s, "x", 1, 0, AS(one));
	CHECK(asked_for[SOURCE] == before + 1 && !sv_getsockname(s, (struct sockaddr *)&own, &length));
	CHECK(own.sv_srvid.s_sid[0] == 0x77);
	hang_up_next = true;
	sv_sendto(s, "x", 1, 0, AS(other));
	CHECK(asked_for[SOURCE] == before + 2 && asked[1] == SOURCE && !memcmp(asked + 8, &own.sv_srvid, 32));
	CHECK(!sv_getsockname(s, (struct sockaddr *)&again, &length) && !memcmp(&own, &again, sizeof(own)) && !sv_close(s));
}

static void note_signal(int number)
{
	(void)number;
	sem_post(&handled);
}

static void *ask_slowly(void *unused)
{
	struct sockaddr_sv name;

	(void)unused;
	return (void *)(intptr_t)sv_name("web.shop", &name);
}

/* Nothing waits for a thread that waits for the agent, and a signal does not end its question. */
static void an_agent_that_takes_its_time(void)
{
	struct sigaction action = { .sa_handler = note_signal };
	int s = sv_socket(PF_SERVAL, SOCK_DGRAM, 0), status;
	struct sockaddr_sv name;
	pthread_t slow;
	pid_t child;
	void *result;

	CHECK(!sem_init(&held, 0, 0) && !sem_init(&go, 0, 0) && !sem_init(&handled, 0, 0));
	CHECK(!sigaction(SIGUSR1, &action, NULL));
	hold_next = true;
	CHECK(!pthread_create(&slow, NULL, ask_slowly, NULL));
	while (sem_wait(&held))
		;
	CHECK(!sv_name("adm.shop", &name) && !sv_bind(s, AS(name)));
	child = fork();
	if (!child)
		_exit(sv_name("web.shop", &name));
	CHECK(waitpid(child, &status, 0) == child && status == 0);
	CHECK(!pthread_kill(slow, SIGUSR1));
	while (sem_wait(&handled))
		;
	sem_post(&go);
	CHECK(!pthread_join(slow, &result) && !result && !sv_close(s));
}

static void a_child_of_vfork(void)
{
	struct sockaddr_sv name = some(0xab, 0), got;
	socklen_t length = sizeof(got);
	int s = sv_socket(PF_SERVAL, SOCK_DGRAM, 0), status;
	pid_t child;

	CHECK(!sv_bind(s, AS(name)));
	child = vfork();
	if (!child) {
		sv_close(s);
		sv_dup2(0, s);
		sv_getsockname(s, (struct sockaddr *)&got, &length);
		_exit(0);
	}
	length = sizeof(got);
	CHECK(waitpid(child, &status, 0) == child && status == 0);
	CHECK(!sv_getsockname(s, (struct sockaddr *)&got, &length) && !memcmp(&got, &name, sizeof(got)) && !sv_close(s));
}

static void *report_in_the_middle(void *unused)
{
	struct sockaddr_sv name = some(0xab, 96);

	(void)unused;
	CHECK(!sv_report_load(AS(name), 10));
	return NULL;
}

static void reports_of_load(void)
{
	struct sockaddr_sv name = some(0xab, 96), whole = some(0xcd, 0);
	int before = connections, child, status;
	pthread_t thread;

	CHECK(sv_report_load(AS(name), 101) == -1 && errno == EINVAL && strstr(sv_strerror(), "0 to 100"));
	CHECK(sv_report_load((struct sockaddr *)&name, 3, 1) == -1 && errno == EINVAL && !asked_for[LOAD]);
	CHECK(!sv_report_load(AS(name), 40) && asked_length == 56 && passed_inode == 0);
	CHECK(!memcmp(asked, "\1\17\0\0\0\50\0\140\253", 9));
	CHECK(!sv_report_load(AS(whole), 0) && !memcmp(asked, "\1\17\0\0\0\0\1\0\315", 9));
	CHECK(connections == before + 1);
	/* Questions go elsewhere, and end nothing of it. */
	refuse_with = EACCES;
	CHECK(sv_report_load(AS(name), 1) == -1 && errno == EACCES && !strcmp(sv_strerror(), "because"));
	refuse_with = EBADMSG;
	CHECK(sv_report_load(AS(name), 1) == -1 && errno == EOPNOTSUPP && strstr(sv_strerror(), "earlier release"));
	refuse_with = 0;
	CHECK(!sv_name("web.shop", &whole) && !sv_report_load(AS(name), 100) && asked[5] == 100);
	CHECK(connections <= before + 2);
	/* An agent that was started again is told by a new connection. */
	before = connections;
	hang_up_next = true;
	CHECK(!sv_report_load(AS(name), 7) && asked[5] == 7 && connections == before + 1);
	/* One at a time. */
	hold_next = true;
	CHECK(!pthread_create(&thread, NULL, report_in_the_middle, NULL));
	CHECK(!sem_wait(&held));
	CHECK(sv_report_load(AS(name), 7) == -1 && errno == EBUSY);
	sem_post(&go);
	CHECK(!pthread_join(thread, NULL) && !sv_report_load(AS(name), 8) && connections == before + 1);
	/* A child has a connection of its own. */
	child = fork();
	CHECK(child >= 0);
	if (!child) {
		alarm(20);
		_exit(sv_report_load(AS(name), 9) ? 1 : 0);
	}
	CHECK(waitpid(child, &status, 0) == child && status == 0);
	CHECK(connections == before + 2 && !sv_report_load(AS(name), 10) && connections == before + 2);
}

static void the_next_box(void)
{
	struct sockaddr_in from = { .sin_family = AF_INET, .sin_port = htons(40000) };
	struct sockaddr_in to = { .sin_family = AF_INET, .sin_port = htons(443) };
	struct sockaddr_in6 wide = { .sin6_family = AF_INET6, .sin6_port = htons(1) };
	struct sockaddr_sv name = some(0xab, 0);
	char long_text[257] = { 0 };

	inet_pton(AF_INET, "10.0.0.7", &from.sin_addr);
	inet_pton(AF_INET, "198.18.0.9", &to.sin_addr);
	inet_pton(AF_INET6, "fd00::7", &wide.sin6_addr);
	memset(long_text, 'x', 256);
#define NEXT_OF(boxes, protocol, from, to) sv_pass_next(boxes, protocol, (struct sockaddr *)&(from), AS(to))
	CHECK(NEXT_OF(long_text, IPPROTO_TCP, from, to) == -1 && errno == EINVAL && strstr(sv_strerror(), "255"));
	CHECK(NEXT_OF(NULL, IPPROTO_TCP, from, to) == -1 && errno == EINVAL);
	CHECK(NEXT_OF("ids.shop", IPPROTO_ICMP, from, to) == -1 && errno == EPROTONOSUPPORT);
	CHECK(NEXT_OF("ids.shop", IPPROTO_TCP, name, name) == -1 && errno == EAFNOSUPPORT);
	CHECK(sv_pass_next("ids.shop", IPPROTO_TCP, NULL, AS(to)) == -1 && errno == EINVAL);
	CHECK(sv_pass_next("ids.shop", IPPROTO_UDP, (struct sockaddr *)&wide, (struct sockaddr *)&wide, sizeof(to)) == -1 &&
	      errno == EINVAL && !asked_for[NEXT]);
	CHECK(!NEXT_OF("ids.shop fw2.shop", IPPROTO_TCP, from, to) && asked_length == 56 + 17 && passed_inode == 0);
	/* Version, kind, protocol, port; destination, port, zero; source; names. */
	CHECK(!memcmp(asked, "\1\20\6\0\234\100\0\0", 8));
	CHECK(!memcmp(asked + 8, "\0\0\0\0\0\0\0\0\0\0\377\377\306\22\0\11\1\273\0\0\0\0\0\0\0\0\0\0\0\0\0\0", 32));
	CHECK(!memcmp(asked + 40, "\0\0\0\0\0\0\0\0\0\0\377\377\12\0\0\7ids.shop fw2.shop", 33));
	CHECK(!NEXT_OF("ids.shop", IPPROTO_UDP, wide, wide) && !memcmp(asked, "\1\20\21\0\0\1\0\0\375\0", 10));
	CHECK(asked[23] == 7 && asked[25] == 1 && asked[40] == 0xfd && asked[55] == 7);
	refuse_with = EPERM;
	CHECK(NEXT_OF("ids.shop", IPPROTO_TCP, from, to) == -1 && errno == EPERM && !strcmp(sv_strerror(), "because"));
	refuse_with = EBADMSG;
	CHECK(NEXT_OF("ids.shop", IPPROTO_TCP, from, to) == -1 && errno == EOPNOTSUPP && strstr(sv_strerror(), "earlier release"));
	refuse_with = 0;
#undef NEXT_OF
}

static void *many_names(void *unused)
{
	struct sockaddr_sv name;

	(void)unused;
	for (int round = 0; round < 300; round++) {
		int s = sv_socket(PF_SERVAL, SOCK_DGRAM, 0);

		CHECK(s >= 0 && !sv_name("web.shop", &name) && name.sv_srvid.s_sid[0] == 0xab);
		CHECK(!sv_bind(s, AS(name)) && !sv_close(s));
	}
	return NULL;
}

static void threads(void)
{
	pthread_t all[4];

	for (int at = 0; at < 4; at++)
		CHECK(!pthread_create(&all[at], NULL, many_names, NULL));
	for (int at = 0; at < 4; at++)
		pthread_join(all[at], NULL);
}

int main(void)
{
	/* Whatever waits for ever fails. */
	alarm(120);
	snprintf(path, sizeof(path), "%s/agent.sock", getenv("WORK"));
	setenv("MARGAY_PROGRAMS", path, 1);
	without_agent();
	misuse();
	start_agent();
	names();
	a_bound_socket();
	descriptors_that_changed_hands();
	forks_and_restarts();
	a_named_socket();
	an_agent_that_takes_its_time();
	a_child_of_vfork();
	reports_of_load();
	the_next_box();
	threads();
	puts("unit: ok");
	return 0;
}

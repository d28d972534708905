/* SPDX-License-Identifier: Apache-2.0
 *
 * An agent of a few lines, for the test of hand-over: it keeps what it was asked, and what came with it.
 */
#ifndef AGENT_H
#define AGENT_H

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <semaphore.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <time.h>
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

#define AS(address) ((struct sockaddr *)&(address)), sizeof(address)
#define MIB (1 << 20)
#define REQUEST_LEN 56
#define REPLY_LEN 60

enum { NAME = 1, PEER = 5, RANGES = 8, HAND_OVER, TAKE_OVER, HANDED, GIVE };

/* What the agent does with the next HAND_OVER. */
enum manner {
	GRANT,
	REFUSE, /* with ESRCH */
	LOSE, /* refuses with ECONNABORTED */
	DIE, /* closes the connection and does not answer */
	MUMBLE, /* answers less than a reply */
	DIGRESS, /* answers another question, with a yes */
	UPGRADE, /* is of another version, and refuses */
	SLEEP, /* does not answer in time */
};

static char path[108];
static int listener;
static atomic_int connections, manner, gifts, peers;
/* The agent has too many connections; it ends the one that was open. */
static atomic_bool is_full, is_restarted, refuses_takers, has_no_patience, waits_for_end;

/* The last request of HAND_OVER or TAKE_OVER, and what came with it. */
static unsigned char asked[400];
static ssize_t asked_length;
static int passed_count, control_count;
static ino_t passed_inode;
static char file_name[64];
static unsigned char *file_data;
static off_t file_length;
/* The agent's end of the connection of whoever takes over. */
static int taker = -1;

/* For whoever waits until the agent has closed something. */
static pthread_mutex_t closing = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t has_closed = PTHREAD_COND_INITIALIZER;

static void close_here(int fd)
{
	close(fd);
	pthread_mutex_lock(&closing);
	pthread_cond_broadcast(&has_closed);
	pthread_mutex_unlock(&closing);
}

/* What the library waits with for the reply to HAND_OVER: in vain, and not for long, or until the connection has ended.
 */
int poll_here(struct pollfd *polled, nfds_t count, int timeout_ms) __asm__("poll");

int poll_here(struct pollfd *polled, nfds_t count, int timeout_ms)
{
	struct timespec patience = { timeout_ms / 1000, timeout_ms % 1000 * 1000000L };
	bool is_for_reply = polled->events == POLLIN && timeout_ms > 9000;
	struct pollfd end = { .fd = polled->fd };

	if (is_for_reply && has_no_patience)
		patience = (struct timespec){ 0, 50000000 };
	if (is_for_reply && waits_for_end)
		ppoll(&end, 1, &patience, NULL);
	return ppoll(polled, count, timeout_ms < 0 ? NULL : &patience, NULL);
}

static void note_file(int fd)
{
	char link[64];
	struct stat about;
	ssize_t length;

	snprintf(link, sizeof(link), "/proc/self/fd/%d", fd);
	length = readlink(link, file_name, sizeof(file_name) - 1);
	CHECK(length > 0 && !fstat(fd, &about) && S_ISREG(about.st_mode));
	file_name[length] = '\0';
	file_length = about.st_size;
	free(file_data);
	file_data = malloc((size_t)about.st_size + 1);
	CHECK(pread(fd, file_data, (size_t)about.st_size + 1, 0) == about.st_size);
}

static ssize_t receive(int connection, unsigned char bytes[sizeof(asked)])
{
	union {
		struct cmsghdr header;
		char space[512];
	} control;
	struct iovec part = { bytes, sizeof(asked) };
	struct msghdr message = {
		.msg_iov = &part, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof(control)
	};
	ssize_t length = recvmsg(connection, &message, MSG_CMSG_CLOEXEC);
	bool is_noted = length > 0 && (bytes[1] == HAND_OVER || bytes[1] == TAKE_OVER);
	struct stat about;
	int count = 0, parts = 0;

	if (length <= 0)
		return length;
	for (struct cmsghdr *one = CMSG_FIRSTHDR(&message); one; one = CMSG_NXTHDR(&message, one), parts++) {
		for (size_t at = 0; at < (one->cmsg_len - CMSG_LEN(0)) / sizeof(int); at++, count++) {
			int fd;

			memcpy(&fd, CMSG_DATA(one) + at * sizeof(int), sizeof(fd));
			if (is_noted && !count)
				passed_inode = fstat(fd, &about) ? 0 : about.st_ino;
			if (is_noted && count == 1)
				note_file(fd);
			close_here(fd);
		}
	}
	if (is_noted) {
		memcpy(asked, bytes, sizeof(asked));
		asked_length = length;
		passed_count = count;
		control_count = parts;
	}
	return length;
}

/* False: the connection ends. */
static bool answer_gift(int connection, unsigned char reply[300])
{
	size_t length = REPLY_LEN;

	switch (atomic_exchange(&manner, GRANT)) {
	case DIE:
		return false;
	case SLEEP:
		return true;
	case MUMBLE:
		length = 20;
		break;
	case DIGRESS:
		reply[1] = PEER;
		break;
	case UPGRADE:
		reply[0] = 2;
		reply[3] = EPROTONOSUPPORT;
		break;
	case LOSE:
		reply[3] = ECONNABORTED;
		length += (size_t)sprintf((char *)reply + REPLY_LEN, "nobody has it");
		break;
	case REFUSE:
		reply[3] = ESRCH;
		length += (size_t)sprintf((char *)reply + REPLY_LEN, "nobody takes it");
	}
	send(connection, reply, length, MSG_NOSIGNAL);
	return true;
}

static void *serve(void *argument)
{
	int connection = (int)(intptr_t)argument;
	unsigned char bytes[sizeof(asked)] = { 0 };
	bool is_takers;
	ssize_t got;

	while ((got = receive(connection, bytes)) > 0) {
		unsigned char reply[300] = { 1, bytes[1], 0, 0, bytes[6], bytes[7] };

		memcpy(reply + 8, bytes + 8, 32);
		if (bytes[1] == HAND_OVER) {
			gifts++;
			if (!answer_gift(connection, reply))
				break;
			continue;
		}
		if (bytes[1] == NAME)
			reply[4] = 1;
		if (bytes[1] == PEER) {
			peers++;
			reply[8] = 0x99;
		}
		/* All addresses of the loopback stand for names, so that what comes there has come by one. */
		if (bytes[1] == RANGES) {
			reply[55] = 1;
			memcpy(reply + 56, "\x7f\0\0\1", 4);
		}
		if (bytes[1] == TAKE_OVER && refuses_takers)
			reply[3] = EACCES;
		is_takers = bytes[1] == TAKE_OVER && !refuses_takers;
		if (is_takers)
			taker = connection;
		send(connection, reply, REPLY_LEN, MSG_NOSIGNAL);
		/* From its reply on, the test has it. */
		if (is_takers)
			return NULL;
		if (atomic_exchange(&is_restarted, false))
			break;
	}
	close_here(connection);
	return NULL;
}

/* As the agent does it: it says so, and does not read what was asked meanwhile. */
static void turn_away(int connection)
{
	unsigned char reply[300] = { 1, 0, 0, EUSERS };
	struct pollfd asks = { .fd = connection, .events = POLLIN };

	send(connection, reply, (size_t)(REPLY_LEN + sprintf((char *)reply + REPLY_LEN, "too many")), MSG_NOSIGNAL);
	poll(&asks, 1, 5000);
	close_here(connection);
}

static void *accept_all(void *unused)
{
	struct pollfd waits = { .fd = listener, .events = POLLIN };
	pthread_t thread;
	int connection;

	(void)unused;
	for (;;) {
		/* Who waits in accept has taken a descriptor for it, and there may be none to take. */
		CHECK(poll(&waits, 1, -1) == 1);
		connection = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
		CHECK(connection >= 0);
		connections++;
		if (atomic_exchange(&is_full, false)) {
			turn_away(connection);
			continue;
		}
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
	CHECK(!bind(listener, AS(address)) && !listen(listener, 16));
	CHECK(!pthread_create(&thread, NULL, accept_all, NULL));
}

#endif

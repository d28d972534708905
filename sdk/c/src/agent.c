/* SPDX-License-Identifier: Apache-2.0
 *
 * Connections of this process to the agent of its host: one request, one reply. A thread that waits for a reply has
 * its connection to itself and holds no lock, so that others go on, forks too, and signals are handled. One
 * connection stays open for the next. A connection on which the agent gives sockets is the program's own descriptor.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <poll.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/un.h>

#include "internal.h"

#define DEFAULT_PATH "/run/margay/programs.sock"
#define VERSION 1
#define REQUEST_LEN 56
#define REPLY_LEN 60
/* An agent that takes longer is not there. */
#define PATIENCE_S 5
/* For a socket that is given, maybe to another host: the agent answers before, and whoever does not wait so long has
 * lost it.
 */
#define GIVE_PATIENCE_S 45
/* Programs count on low numbers being theirs. */
#define HIGH_FD 512

/* Threads whose connection a child of fork closes; those of more at once stay open there until it ends. */
#define CONNECTIONS_MAX 32

/* A reply, and the text of one that is too long for this library. */
#define REPLY_ROOM (REPLY_LEN + 1100)
/* As many descriptors as the kernel passes in one message. */
#define PASSED_MAX 253

struct connection {
	int fd;
	uint64_t inode; /* which socket it was: programs close what they do not know, and the number goes to somebody else */
	bool is_there, is_busy;
};

/* Under the lock of the agent. */
static struct connection connections[CONNECTIONS_MAX];
/* That of reports of load. */
static struct connection reporting;
static atomic_uint connections_made;

static bool is_open(const struct connection *connection)
{
	struct stat about;

	return !fstat(connection->fd, &about) && about.st_ino == connection->inode;
}

static void hang_up(struct connection *connection)
{
	if (connection->is_there && is_open(connection))
		REAL(close)(connection->fd);
	connection->is_there = false;
}

/* In a child of fork. The connections are the parent's: replies would go astray. */
void agent_forget(void)
{
	for (unsigned int at = 0; at < CONNECTIONS_MAX; at++)
		hang_up(&connections[at]);
	hang_up(&reporting);
	reporting.is_busy = false;
}

/* The connection that waits for a question, which is this thread's from now on; false: there is none. */
static bool take_idle(struct connection *taken)
{
	struct section section;
	bool found = false;

	section_enter(&section, &agent_lock);
	for (unsigned int at = 0; at < CONNECTIONS_MAX && !found; at++) {
		struct connection *known = &connections[at];

		if (!known->is_there || known->is_busy)
			continue;
		found = is_open(known);
		known->is_busy = found;
		known->is_there = found;
		if (found)
			*taken = *known;
	}
	section_leave(&section, &agent_lock);
	return found;
}

/* Enters a connection that was just made. */
static void note_busy(const struct connection *made)
{
	struct section section;

	section_enter(&section, &agent_lock);
	for (unsigned int at = 0; at < CONNECTIONS_MAX; at++) {
		if (!connections[at].is_there) {
			connections[at] = *made;
			break;
		}
	}
	connections_made++;
	section_leave(&section, &agent_lock);
}

/* The question is over. The connection waits for the next one, if none does and it `is_good`. */
static void give_back(struct connection *used, bool is_good)
{
	struct connection *own = NULL;
	struct section section;

	section_enter(&section, &agent_lock);
	for (unsigned int at = 0; at < CONNECTIONS_MAX; at++) {
		struct connection *known = &connections[at];

		if (known->is_there && !known->is_busy)
			is_good = false;
		if (known->is_there && known->is_busy && known->fd == used->fd && known->inode == used->inode)
			own = known;
	}
	if (own && is_good)
		own->is_busy = false;
	else
		hang_up(own ? own : used);
	section_leave(&section, &agent_lock);
}

static const char *agent_path(void)
{
	/* A program that has more rights than who started it asks no agent of that one's choice. */
	const char *path = secure_getenv("MARGAY_PROGRAMS");

	return path && *path ? path : DEFAULT_PATH;
}

/* The abstract name of the agent's socket is its path. Anybody may take such a name: whoever has it must be root, or of
 * this user.
 */
static int connect_by_name(int fd, const char *path)
{
	struct sockaddr_un address = { .sun_family = AF_UNIX };
	size_t length = strlen(path);
	struct ucred peer;
	socklen_t size = sizeof(peer);
	int failed;

	if (length + 1 > sizeof(address.sun_path))
		return -1;
	memcpy(address.sun_path + 1, path, length);
	do {
		failed = REAL(connect)(fd, (const struct sockaddr *)&address,
				       (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + length));
	} while (failed && errno == EINTR);
	if (failed || getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &size))
		return -1;
	return peer.uid == 0 || peer.uid == geteuid() ? 0 : -1;
}

/* A descriptor that is connected to the agent, or -1. */
static int connect_to_agent(void)
{
	struct timeval patience = { .tv_sec = PATIENCE_S };
	struct sockaddr_un address = { .sun_family = AF_UNIX };
	const char *path = agent_path();
	int fd, failed, error;

	if (strlen(path) >= sizeof(address.sun_path))
		return fail(ENAMETOOLONG, "MARGAY_PROGRAMS is too long for the path of a socket: %s", path);
	strcpy(address.sun_path, path);
	fd = REAL(socket)(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
	if (fd < 0)
		return fail(errno, "no socket for the agent: %s", strerror(errno));
	setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof(patience));
	do {
		failed = REAL(connect)(fd, (const struct sockaddr *)&address, sizeof(address));
	} while (failed && errno == EINTR);
	error = errno;
	/* In a root directory of the program's own there is no such file. */
	if (failed && (error == ENOENT || error == ENOTDIR || error == EACCES))
		failed = connect_by_name(fd, path);
	if (failed) {
		REAL(close)(fd);
		return fail(ENETDOWN, "no margay agent answers at %s (%s); start it with `margay up`", path, strerror(error));
	}
	return fd;
}

/* A connection that is in no list yet. */
static int open_connection(struct connection *made)
{
	int fd = connect_to_agent(), high;
	struct stat about;

	if (fd < 0)
		return -1;
	high = REAL(fcntl)(fd, F_DUPFD_CLOEXEC, HIGH_FD);
	if (high >= 0) {
		REAL(close)(fd);
		fd = high;
	}
	if (fstat(fd, &about)) {
		int error = errno;

		REAL(close)(fd);
		return fail(ENETDOWN, "the connection to the margay agent was closed meanwhile (%s)", strerror(error));
	}
	*made = (struct connection){ .fd = fd, .inode = about.st_ino, .is_there = true, .is_busy = true };
	return 0;
}

static int call_agent(struct connection *made)
{
	if (open_connection(made))
		return -1;
	note_busy(made);
	return 0;
}

unsigned int agent_connection(void)
{
	return connections_made;
}

static void put16(uint8_t *at, uint16_t value)
{
	at[0] = (uint8_t)(value >> 8);
	at[1] = (uint8_t)value;
}

static uint16_t get16(const uint8_t *at)
{
	return (uint16_t)(at[0] << 8 | at[1]);
}

static size_t write_request(const struct request *request, uint8_t bytes[REQUEST_LEN + TEXT_MAX])
{
	size_t length = request->text ? strlen(request->text) : 0;

	memset(bytes, 0, REQUEST_LEN);
	bytes[0] = VERSION;
	bytes[1] = (uint8_t)request->kind;
	bytes[2] = request->protocol;
	put16(bytes + 4, request->port);
	put16(bytes + 6, request->bits);
	memcpy(bytes + 8, &request->id, 32);
	memcpy(bytes + 40, &request->address, 16);
	if (length > TEXT_MAX)
		length = TEXT_MAX;
	memcpy(bytes + REQUEST_LEN, request->text ? request->text : "", length);
	return REQUEST_LEN + length;
}

static int read_reply(const uint8_t *bytes, size_t length, enum request_kind kind, struct reply *reply)
{
	size_t text;
	int error;

	if (length < REPLY_LEN || bytes[0] != VERSION)
		return fail(EPROTO, "the agent speaks another version than this library; install both of one release");
	text = length - REPLY_LEN;
	error = get16(bytes + 2);
	if (error)
		return fail(error, "%.*s", (int)text, (const char *)bytes + REPLY_LEN);
	if (kind != ANY && bytes[1] != kind)
		return fail(EPROTO, "the agent has answered another question");
	reply->kind = bytes[1];
	reply->bits = get16(bytes + 4);
	reply->port = get16(bytes + 6);
	memcpy(&reply->id, bytes + 8, 32);
	memcpy(&reply->v6, bytes + 40, 16);
	memcpy(&reply->v4, bytes + 56, 4);
	if (text > TEXT_MAX)
		text = TEXT_MAX;
	memcpy(reply->text, bytes + REPLY_LEN, text);
	reply->text[text] = '\0';
	return 0;
}

int64_t now_ms(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

/* Whatever signals are handled meanwhile. */
static int wait_for(int fd, short what, int64_t until_ms)
{
	struct pollfd waited = { .fd = fd, .events = what };
	int64_t left;
	int ready;

	do {
		left = until_ms - now_ms();
		ready = poll(&waited, 1, left > 0 ? (int)left : 0);
	} while (ready < 0 && errno == EINTR);
	if (!ready)
		errno = EAGAIN;
	return ready > 0 ? 0 : -1;
}

/* `passed`: descriptors that go with it, those that are -1 excepted. An error: nothing was sent. */
static ssize_t say(int fd, const uint8_t *bytes, size_t length, const int passed[2], int64_t until_ms)
{
	union {
		struct cmsghdr header;
		char space[CMSG_SPACE(2 * sizeof(int))];
	} control;
	struct iovec part = { .iov_base = (void *)bytes, .iov_len = length };
	struct msghdr message = { .msg_iov = &part, .msg_iovlen = 1 };
	int descriptors[2];
	size_t count = 0;

	for (size_t at = 0; at < 2; at++)
		if (passed[at] >= 0)
			descriptors[count++] = passed[at];
	if (count) {
		memset(&control, 0, sizeof(control));
		message.msg_control = &control;
		message.msg_controllen = CMSG_SPACE(count * sizeof(int));
		control.header.cmsg_level = SOL_SOCKET;
		control.header.cmsg_type = SCM_RIGHTS;
		control.header.cmsg_len = CMSG_LEN(count * sizeof(int));
		memcpy(CMSG_DATA(&control.header), descriptors, count * sizeof(int));
	}
	if (wait_for(fd, POLLOUT, until_ms))
		return -1;
	return REAL(sendmsg)(fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
}

static ssize_t hear(int fd, uint8_t bytes[REPLY_ROOM], int64_t until_ms)
{
	ssize_t got;

	if (wait_for(fd, POLLIN, until_ms))
		return -1;
	got = REAL(recvfrom)(fd, bytes, REPLY_ROOM, MSG_DONTWAIT, NULL, NULL);
	/* The agent has closed the connection without reading the request. That it had too many, it has said before:
	 * the kernel tells the one first, and then the other.
	 */
	if (got < 0 && errno == ECONNRESET)
		got = REAL(recvfrom)(fd, bytes, REPLY_ROOM, MSG_DONTWAIT, NULL, NULL);
	return got;
}

/* Whether what was asked for may have been done, or not: it is neither a yes nor a no. One of another version is a no,
 * since its agent has not understood the request.
 */
static bool says_nothing(const uint8_t *bytes, size_t length, enum request_kind kind)
{
	if (bytes[0] != VERSION)
		return false;
	return length < REPLY_LEN || (!get16(bytes + 2) && bytes[1] != kind);
}

/* A question, and what became of it. */
struct question {
	const struct request *request;
	int file; /* goes after the request's descriptor; -1: none */
	int patience_s;
	bool is_unknown; /* it was sent, and nobody can say whether it was carried out */
};

/* Once: 0, -1 for good, or 1 where the agent was started again meanwhile. */
static int ask_once(struct question *question, struct reply *reply)
{
	uint8_t asked[REQUEST_LEN + TEXT_MAX], answered[REPLY_ROOM];
	const struct request *request = question->request;
	const int passed[2] = { request->fd, question->file };
	size_t length = write_request(request, asked);
	int64_t until_ms = now_ms() + question->patience_s * 1000;
	struct connection connection;
	bool was_open = take_idle(&connection);
	ssize_t got;
	int error;

	if (!was_open && call_agent(&connection))
		return -1;
	if (say(connection.fd, asked, length, passed, until_ms) < 0) {
		error = errno;
		give_back(&connection, error == EBADF);
		if (error == EBADF)
			return fail(EBADF, "the descriptor is not open");
		return was_open ? 1 : fail(ENETDOWN, "the margay agent takes no request: %s", strerror(error));
	}
	got = hear(connection.fd, answered, until_ms);
	error = errno;
	/* A late reply would be taken for that of the next request. */
	give_back(&connection, got > 0);
	question->is_unknown = got <= 0 || says_nothing(answered, (size_t)got, request->kind);
	if (got > 0)
		return read_reply(answered, (size_t)got, request->kind, reply);
	if (got < 0 && (error == EAGAIN || error == EWOULDBLOCK))
		return fail(ETIMEDOUT, "the margay agent has not answered within %d seconds", question->patience_s);
	return was_open ? 1 : fail(ENETDOWN, "the margay agent has ended the connection; see its log");
}

int agent_ask(const struct request *request, struct reply *reply)
{
	struct question question = { .request = request, .file = -1, .patience_s = PATIENCE_S };
	int result, cancel;

	/* A thread that is ended meanwhile would leave its connection open. */
	pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &cancel);
	result = ask_once(&question, reply);
	if (result > 0)
		result = ask_once(&question, reply);
	pthread_setcancelstate(cancel, NULL);
	return result;
}

/* The connection of reports is this thread's until `give_reporting_back`: 0, or -1 where it is another thread's. */
static int take_reporting(struct connection *taken)
{
	struct section section;
	bool is_free;

	section_enter(&section, &agent_lock);
	is_free = !reporting.is_busy;
	if (is_free) {
		reporting.is_there = reporting.is_there && is_open(&reporting);
		reporting.is_busy = true;
		*taken = reporting;
	}
	section_leave(&section, &agent_lock);
	return is_free ? 0 : fail(EBUSY, "another thread of this process reports its load at this moment");
}

/* For a child of fork, which closes it. */
static void note_reporting(const struct connection *made)
{
	struct section section;

	section_enter(&section, &agent_lock);
	reporting = *made;
	section_leave(&section, &agent_lock);
}

static void give_reporting_back(bool is_good)
{
	struct section section;

	section_enter(&section, &agent_lock);
	if (!is_good)
		hang_up(&reporting);
	reporting.is_busy = false;
	section_leave(&section, &agent_lock);
}

/* Once: 0, -1 for good, or 1 where the agent was started again meanwhile. */
static int report_once(const struct request *request, struct reply *reply)
{
	uint8_t asked[REQUEST_LEN + TEXT_MAX], answered[REPLY_ROOM];
	const int passed[2] = { -1, -1 };
	size_t length = write_request(request, asked);
	int64_t until_ms = now_ms() + PATIENCE_S * 1000;
	struct connection connection;
	bool was_open, is_late;
	ssize_t got = -1;

	if (take_reporting(&connection))
		return -1;
	was_open = connection.is_there;
	if (!was_open) {
		if (open_connection(&connection)) {
			give_reporting_back(false);
			return -1;
		}
		note_reporting(&connection);
	}
	if (say(connection.fd, asked, length, passed, until_ms) >= 0)
		got = hear(connection.fd, answered, until_ms);
	is_late = got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK);
	give_reporting_back(got > 0);
	if (got > 0)
		return read_reply(answered, (size_t)got, request->kind, reply);
	if (is_late)
		return fail(ETIMEDOUT, "the margay agent has not answered within %d seconds", PATIENCE_S);
	return was_open ? 1 : fail(ENETDOWN, "the margay agent has ended the connection; see its log");
}

int agent_report(const struct request *request, struct reply *reply)
{
	int result, cancel;

	pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &cancel);
	result = report_once(request, reply);
	if (result > 0)
		result = report_once(request, reply);
	pthread_setcancelstate(cancel, NULL);
	return result;
}

int agent_give(const struct request *request, int file, bool *is_unknown)
{
	struct question question = { .request = request, .file = file, .patience_s = GIVE_PATIENCE_S };
	struct reply reply;
	int result, cancel;

	pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &cancel);
	result = ask_once(&question, &reply);
	/* A connection from before the agent's restart has not taken it. What was sent is never sent again: another
	 * process may have the socket already.
	 */
	if (result > 0 && !question.is_unknown)
		result = ask_once(&question, &reply);
	pthread_setcancelstate(cancel, NULL);
	*is_unknown = question.is_unknown;
	if (result > 0)
		return fail(ENETDOWN, "the margay agent has ended the connection; see its log");
	return result;
}

int agent_splice(int left, int right, uint16_t who_relays, bool *is_unknown)
{
	struct request request = { .kind = ASK_SPLICE, .protocol = IPPROTO_TCP, .port = who_relays, .fd = left };
	struct question question = { .request = &request, .file = right, .patience_s = PATIENCE_S };
	struct reply reply;
	int result, cancel;

	pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &cancel);
	result = ask_once(&question, &reply);
	/* A connection from before the agent's restart has not taken it; an agent that has and died has ended it. */
	if (result > 0 && !question.is_unknown)
		result = ask_once(&question, &reply);
	pthread_setcancelstate(cancel, NULL);
	*is_unknown = question.is_unknown;
	if (result > 0)
		return fail(ENETDOWN, "the margay agent has ended the connection; see its log");
	/* It does not know the question. */
	if (result && errno == EBADMSG)
		return fail(EOPNOTSUPP, "the margay agent of this host is of an earlier release, which makes no one "
			    "connection of two; install a newer one");
	return result;
}

int agent_open(const struct request *request)
{
	uint8_t asked[REQUEST_LEN + TEXT_MAX], answered[REPLY_ROOM];
	int64_t until_ms = now_ms() + PATIENCE_S * 1000;
	const int passed[2] = { request->fd, -1 };
	int fd, cancel, result = 0;
	struct reply reply;
	ssize_t got = -1;

	pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &cancel);
	fd = connect_to_agent();
	if (fd >= 0) {
		if (say(fd, asked, write_request(request, asked), passed, until_ms) >= 0)
			got = hear(fd, answered, until_ms);
		if (got > 0)
			result = read_reply(answered, (size_t)got, request->kind, &reply);
		else if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK))
			result = fail(ETIMEDOUT, "the margay agent has not answered within %d seconds", PATIENCE_S);
		else
			result = fail(ENETDOWN, "the margay agent has ended the connection; see its log");
		if (result) {
			int error = errno;

			REAL(close)(fd);
			errno = error;
			fd = -1;
		}
	}
	pthread_setcancelstate(cancel, NULL);
	return fd;
}

/* The first two descriptors that came with a message; the others are closed. */
static void sort_passed(struct msghdr *message, int passed[2])
{
	size_t count = 0;

	for (struct cmsghdr *part = CMSG_FIRSTHDR(message); part; part = CMSG_NXTHDR(message, part)) {
		if (part->cmsg_level != SOL_SOCKET || part->cmsg_type != SCM_RIGHTS)
			continue;
		for (size_t at = 0; CMSG_LEN((at + 1) * sizeof(int)) <= part->cmsg_len; at++) {
			int fd;

			memcpy(&fd, CMSG_DATA(part) + at * sizeof(int), sizeof(fd));
			if (count < 2)
				passed[count++] = fd;
			else
				REAL(close)(fd);
		}
	}
}

int agent_next(int fd, struct reply *reply, int passed[2])
{
	union {
		struct cmsghdr header;
		char space[CMSG_SPACE(PASSED_MAX * sizeof(int))];
	} control;
	uint8_t bytes[REPLY_ROOM];
	struct iovec part = { .iov_base = bytes, .iov_len = sizeof(bytes) };
	struct msghdr message = {
		.msg_iov = &part, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof(control.space)
	};
	ssize_t got = REAL(recvmsg)(fd, &message, MSG_CMSG_CLOEXEC);
	int result, error;

	passed[0] = passed[1] = -1;
	if (!got || (got < 0 && errno == ECONNRESET))
		return fail(ESHUTDOWN,
			    "the margay agent has ended this taking over; call sv_takeover again when it is back");
	if (got < 0)
		return -1;
	sort_passed(&message, passed);
	/* Those that did not fit into this process are closed by the kernel. */
	if (message.msg_flags & MSG_CTRUNC)
		result = fail(EMFILE,
			      "no descriptor is free for a socket that was given; close some, or raise RLIMIT_NOFILE");
	else
		result = read_reply(bytes, (size_t)got, ANY, reply);
	if (!result)
		return 0;
	agent_end(fd);
	for (size_t at = 0; at < 2; at++) {
		error = errno;
		if (passed[at] >= 0)
			REAL(close)(passed[at]);
		errno = error;
	}
	return -1;
}

void agent_end(int fd)
{
	int error = errno;

	shutdown(fd, SHUT_RDWR);
	errno = error;
}

int agent_answer(int fd, const struct request *request)
{
	uint8_t said[REQUEST_LEN + TEXT_MAX];
	const int passed[2] = { request->fd, -1 };
	size_t length = write_request(request, said);

	return say(fd, said, length, passed, now_ms() + PATIENCE_S * 1000) < 0 ? -1 : 0;
}

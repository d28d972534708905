/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0
 *
 * One connection of this process to the agent of its host: one request, one reply.
 */
#define _GNU_SOURCE
#include <errno.h>
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
/* Programs count on low numbers being theirs. */
#define HIGH_FD 512

static int agent_fd = -1;
static uint64_t agent_inode;
static atomic_uint agent_connections;

/* In a child of fork. The connection is the parent's: replies would go astray. */
void agent_forget(void)
{
	struct stat about;

	if (agent_fd >= 0 && !fstat(agent_fd, &about) && about.st_ino == agent_inode)
		REAL(close)(agent_fd);
	agent_fd = -1;
}

static const char *agent_path(void)
{
	const char *path = getenv("MARGAY_PROGRAMS");

	return path && *path ? path : DEFAULT_PATH;
}

/* Whether the descriptor is still ours. Programs close what they do not know, and the number goes to somebody else. */
static bool is_open(void)
{
	struct stat about;

	if (agent_fd < 0)
		return false;
	if (!fstat(agent_fd, &about) && about.st_ino == agent_inode)
		return true;
	agent_fd = -1;
	return false;
}

static void hang_up(void)
{
	if (is_open())
		REAL(close)(agent_fd);
	agent_fd = -1;
}

static int call_agent(void)
{
	struct timeval patience = { .tv_sec = PATIENCE_S };
	struct sockaddr_un address = { .sun_family = AF_UNIX };
	const char *path = agent_path();
	struct stat about;
	int fd, high;

	if (strlen(path) >= sizeof(address.sun_path))
		return fail(ENAMETOOLONG, "MARGAY_PROGRAMS is too long for the path of a socket: %s", path);
	strcpy(address.sun_path, path);
	fd = REAL(socket)(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
	if (fd < 0)
		return fail(errno, "no socket for the agent: %s", strerror(errno));
	high = REAL(fcntl)(fd, F_DUPFD_CLOEXEC, HIGH_FD);
	if (high >= 0) {
		REAL(close)(fd);
		fd = high;
	}
	setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience));
	setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof(patience));
	if (REAL(connect)(fd, (const struct sockaddr *)&address, sizeof(address)) || fstat(fd, &about)) {
		int error = errno;

		REAL(close)(fd);
		return fail(ENETDOWN, "no margay agent answers at %s (%s); start it with `margay up`", path, strerror(error));
	}
	agent_fd = fd;
	agent_inode = about.st_ino;
	agent_connections++;
	return 0;
}

unsigned int agent_connection(void)
{
	return agent_connections;
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
	size_t text = length - REPLY_LEN;
	int error;

	if (length < REPLY_LEN || bytes[0] != VERSION)
		return fail(EPROTO, "the agent speaks another version than this library; install both of one release");
	error = get16(bytes + 2);
	if (error)
		return fail(error, "%.*s", (int)text, (const char *)bytes + REPLY_LEN);
	if (bytes[1] != kind)
		return fail(EPROTO, "the agent has answered another question");
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

static ssize_t say(const uint8_t *bytes, size_t length, int passed)
{
	union {
		struct cmsghdr header;
		char space[CMSG_SPACE(sizeof(int))];
	} control;
	struct iovec part = { .iov_base = (void *)bytes, .iov_len = length };
	struct msghdr message = { .msg_iov = &part, .msg_iovlen = 1 };

	if (passed >= 0) {
		memset(&control, 0, sizeof(control));
		message.msg_control = &control;
		message.msg_controllen = sizeof(control.space);
		control.header.cmsg_level = SOL_SOCKET;
		control.header.cmsg_type = SCM_RIGHTS;
		control.header.cmsg_len = CMSG_LEN(sizeof(int));
		memcpy(CMSG_DATA(&control.header), &passed, sizeof(int));
	}
	return REAL(sendmsg)(agent_fd, &message, MSG_NOSIGNAL);
}

/* Once: 0, -1 for good, or 1 where the agent was started again meanwhile. */
static int ask_once(const struct request *request, struct reply *reply)
{
	uint8_t asked[REQUEST_LEN + TEXT_MAX], answered[REPLY_LEN + 1100];
	size_t length = write_request(request, asked);
	bool was_open = is_open();
	ssize_t got;

	if (!was_open && call_agent())
		return -1;
	if (say(asked, length, request->fd) < 0) {
		int error = errno;

		if (error == EBADF)
			return fail(EBADF, "the descriptor is not open");
		hang_up();
		return was_open ? 1 : fail(ENETDOWN, "the margay agent takes no request: %s", strerror(error));
	}
	got = REAL(recvfrom)(agent_fd, answered, sizeof(answered), 0, NULL, NULL);
	if (got > 0)
		return read_reply(answered, (size_t)got, request->kind, reply);
	if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
		/* A late reply would be taken for that of the next request. */
		hang_up();
		return fail(ETIMEDOUT, "the margay agent has not answered within %d seconds", PATIENCE_S);
	}
	hang_up();
	return was_open ? 1 : fail(ENETDOWN, "the margay agent has ended the connection; see its log");
}

int agent_ask(const struct request *request, struct reply *reply)
{
	struct section section;
	int result;

	section_enter(&section, &agent_lock);
	result = ask_once(request, reply);
	if (result > 0)
		result = ask_once(request, reply);
	section_leave(&section, &agent_lock);
	return result;
}

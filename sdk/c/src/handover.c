/* SPDX-License-Identifier: Apache-2.0
 *
 * Sockets that go from one process to the next of the same user, or to another host. At any time one of both owns a
 * socket, or it is closed: the giver until the agent says that the other one has it, the taker from its answer on.
 * A program that takes over may also be asked to give what it has.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "internal.h"

/* The port of a request: the program is to be told what to give. */
#define GIVES 1

static void close_quietly(int fd)
{
	int error = errno;

	if (fd >= 0)
		REAL(close)(fd);
	errno = error;
}

/* As sv_close, but for the error, which stays. */
static void close_socket(int fd)
{
	sock_remove(fd);
	close_quietly(fd);
}

/* A file of the giver's data; -1 with errno. */
static int data_file(const void *data, size_t length)
{
	int file = memfd_create("margay-hand-over", MFD_CLOEXEC);

	for (size_t at = 0; file >= 0 && at < length;) {
		ssize_t done = pwrite(file, (const char *)data + at, length - at, (off_t)at);

		if (done > 0) {
			at += (size_t)done;
		} else if (done == 0 || errno != EINTR) {
			close_quietly(file);
			file = -1;
		}
	}
	return file < 0 ? fail(errno, "no file for the data of the socket: %s", strerror(errno)) : file;
}

/* The name that the socket serves, or was accepted under; without one that is known here, the agent looks for its flow.
 */
static struct request give_request(int fd)
{
	struct request request = { .kind = ASK_HAND_OVER, .protocol = IPPROTO_TCP, .fd = fd };
	struct sock *sock = sock_get(fd);
	struct section section;

	if (!sock)
		return request;
	section_enter(&section, &state_lock);
	if ((sock->is_bound || sock->is_accepted) && sock->local.sv_family == AF_SERVAL) {
		request.id = sock->local.sv_srvid;
		request.bits = bits_of(&sock->local);
	}
	section_leave(&section, &state_lock);
	sock_put(sock);
	return request;
}

int sv_handover(int fd, const char *to, const void *data, size_t length)
{
	struct request request;
	int file = -1, result;
	bool is_unknown, is_lost;

	forget_error();
	/* Cut short it would be another host's name. */
	if (to && strlen(to) > TEXT_MAX)
		return fail(ENAMETOOLONG, "the name of the host has %zu bytes, and %d are the most", strlen(to),
			    TEXT_MAX);
	if (length > SV_HANDOVER_MAX_BYTES)
		return fail(E2BIG, "%zu bytes go with the socket, and %d are the most", length, SV_HANDOVER_MAX_BYTES);
	if (length && !data)
		return fail(EFAULT, "there is no data to go with the socket; its length is 0 then");
	/* A negative one would just not be sent. */
	if (fd < 0)
		return fail(EBADF, "the descriptor is not open");
	if (length) {
		file = data_file(data, length);
		if (file < 0)
			return -1;
	}
	request = give_request(fd);
	request.text = to;
	result = agent_give(&request, file, &is_unknown);
	close_quietly(file);
	/* The agent says that neither host has the connection. */
	is_lost = result && errno == ECONNABORTED;
	if (!result || is_unknown || is_lost)
		close_socket(fd);
	if (result && is_unknown)
		return fail(ECONNABORTED, "the margay agent has not said whether another process has the socket, so that "
			    "it is closed here; see the agent's log");
	return result;
}

static int take_over(const struct sockaddr *name, socklen_t length, uint16_t port)
{
	struct request request = { .kind = ASK_TAKE_OVER, .port = port, .fd = -1 };
	struct sockaddr_sv address;

	forget_error();
	if (address_read(name, length, &address))
		return -1;
	request.id = address.sv_srvid;
	request.bits = bits_of(&address);
	return agent_open(&request);
}

int sv_takeover(const struct sockaddr *name, socklen_t length)
{
	return take_over(name, length, 0);
}

int sv_takeover_giving(const struct sockaddr *name, socklen_t length)
{
	return take_over(name, length, GIVES);
}

/* Reads what the giver says: never mapped, since its file may shrink meanwhile. */
static int read_data(int file, char *data, size_t room, size_t *length)
{
	struct stat about;
	size_t at = 0;

	*length = 0;
	if (file < 0)
		return 0;
	if (fstat(file, &about))
		return fail(errno, "the data of a socket that was given cannot be read: %s", strerror(errno));
	/* Whatever else it is, to read it might take for ever. */
	if (!S_ISREG(about.st_mode))
		return fail(EPROTO, "the data of a socket that was given is in no file");
	*length = about.st_size < SV_HANDOVER_MAX_BYTES ? (size_t)about.st_size : SV_HANDOVER_MAX_BYTES;
	while (at < *length && at < room) {
		ssize_t got = pread(file, data + at, (*length < room ? *length : room) - at, (off_t)at);

		if (got > 0)
			at += (size_t)got;
		else if (!got)
			*length = at;
		else if (errno != EINTR)
			return fail(errno, "the data of a socket that was given cannot be read: %s", strerror(errno));
	}
	return 0;
}

static int option_of(int fd, int option)
{
	int value = 0;
	socklen_t length = sizeof(value);

	return getsockopt(fd, SOL_SOCKET, option, &value, &length) ? -1 : value;
}

/* Enters a socket that has a name: a listening one is as after sv_bind and sv_listen, any other one as after sv_accept,
 * but for its peer. 0 and NULL: it is one of the kernel alone.
 */
static int enter_taken(int fd, const struct reply *handed, struct sock **entered)
{
	int family = option_of(fd, SO_DOMAIN), is_listening = option_of(fd, SO_ACCEPTCONN);
	struct section section;

	*entered = NULL;
	if (!handed->bits || (family != AF_INET && family != AF_INET6))
		return 0;
	if (sock_add(fd, family, SOCK_STREAM, entered))
		return -1;
	section_enter(&section, &state_lock);
	(*entered)->local = address_of(&handed->id);
	(*entered)->local.sv_prefix_bits = (uint8_t)(handed->bits % SERVICE_ID_BITS);
	(*entered)->is_bound = is_listening > 0;
	(*entered)->is_accepted = (*entered)->has_peer = is_listening <= 0;
	(*entered)->peer = address_of(&(struct service_id){ 0 });
	section_leave(&section, &state_lock);
	return 0;
}

/* Asks who the peer is, if there is one. Where nobody knows it any more, its name stays all zero. */
static void find_peer(int fd, struct sock *sock)
{
	struct sockaddr_storage peer;
	socklen_t size = sizeof(peer);
	struct section section;
	struct service_id id;

	if (!REAL(getpeername)(fd, (struct sockaddr *)&peer, &size) && !socket_peer(fd, sock, &peer, &id)) {
		section_enter(&section, &state_lock);
		sock->peer = address_of(&id);
		section_leave(&section, &state_lock);
	}
	forget_error();
}

/* Takes what was handed; the socket is still the caller's to close after an error. */
static int do_take(int takeover, const struct reply *handed, int fd)
{
	const struct request answer = { .kind = HANDED, .fd = -1 };
	struct sock *sock;

	if (enter_taken(fd, handed, &sock))
		return -1;
	if (agent_answer(takeover, &answer)) {
		if (sock)
			sock_put(sock);
		return fail(ECONNABORTED,
			    "it was too late for a socket that was given, or the margay agent has ended; call again");
	}
	/* Last, since an agent that is slow to tell would make the answer late. */
	if (sock) {
		find_peer(fd, sock);
		sock_put(sock);
	}
	return 0;
}

/* Takes the socket of a message of kind HANDED, and closes what came with it; -1: it is its giver's. */
static int take(int takeover, const struct reply *handed, const int passed[2], void *data, size_t room, size_t *length)
{
	size_t all = 0;
	int result;

	if (passed[0] < 0 || handed->bits > SERVICE_ID_BITS)
		result = fail(EPROTO,
			      "the agent has handed over no socket; install it and this library of one release");
	else if (read_data(passed[1], data, room, &all))
		result = -1;
	else
		result = do_take(takeover, handed, passed[0]);
	close_quietly(passed[1]);
	if (result) {
		/* The agent waits for an answer, and ends the taking over without one: the giver learns it now. */
		agent_end(takeover);
		close_socket(passed[0]);
	} else if (length) {
		*length = all;
	}
	return result ? -1 : passed[0];
}

int sv_take_giving(int takeover, void *data, size_t room, size_t *length, struct sv_give *give)
{
	struct reply next;
	int passed[2], result, cancel;

	forget_error();
	for (;;) {
		if (agent_next(takeover, &next, passed))
			return -1;
		/* A thread that is ended from here on would leave the descriptors open. */
		pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &cancel);
		if (next.kind == HANDED) {
			result = take(takeover, &next, passed, data, room, length);
			pthread_setcancelstate(cancel, NULL);
			return result;
		}
		/* What this library does not know is for others, and wants no answer. */
		close_quietly(passed[0]);
		close_quietly(passed[1]);
		pthread_setcancelstate(cancel, NULL);
		if (next.kind != GIVE || !give || next.bits > SERVICE_ID_BITS)
			continue;
		give->name = address_of(&next.id);
		give->name.sv_prefix_bits = (uint8_t)(next.bits % SERVICE_ID_BITS);
		memcpy(give->to, next.text, sizeof(give->to));
		memcpy(give->peer, &next.v6, sizeof(give->peer));
		give->peer_port = next.port;
		return SV_GIVE;
	}
}

int sv_gives(const struct sv_give *give, int fd)
{
	struct in6_addr address = { .s6_addr = { [10] = 0xff, [11] = 0xff } };
	union {
		struct sockaddr any;
		struct sockaddr_in v4;
		struct sockaddr_in6 v6;
	} peer;
	socklen_t size = sizeof(peer);
	in_port_t port;

	forget_error();
	if (!give->peer_port)
		return 1;
	if (REAL(getpeername)(fd, &peer.any, &size))
		return fail(errno, "the socket has no peer: %s", strerror(errno));
	if (peer.any.sa_family == AF_INET) {
		memcpy(&address.s6_addr[12], &peer.v4.sin_addr, 4);
		port = peer.v4.sin_port;
	} else if (peer.any.sa_family == AF_INET6) {
		address = peer.v6.sin6_addr;
		port = peer.v6.sin6_port;
	} else {
		return 0;
	}
	return port == htons(give->peer_port) && !memcmp(&address, give->peer, sizeof(give->peer));
}

int sv_take(int takeover, void *data, size_t room, size_t *length)
{
	return sv_take_giving(takeover, data, room, length, NULL);
}

/* SPDX-License-Identifier: Apache-2.0
 *
 * Framed sockets: SOCK_SEQPACKET. Such a socket is a Unix socket to the process that carries it, which says its packets
 * with a head of one length: crates/margay/src/cli/ensemble/socket/packet.rs has the layout. A payload that a socket's
 * buffer has no room for goes as a file of memory beside its head.
 */
#define _GNU_SOURCE
#include <assert.h>
#include <errno.h>
#include <poll.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "internal.h"

/* Bytes that go within a packet. */
#define INLINE_MAX 65536
#define STREAMS_MAX 256
/* "sid:" and 64 digits, or less. */
#define WHO_MAX 80

struct packet {
	uint8_t kind, flags;
	uint16_t order;
	uint32_t number;
	uint8_t key_length;
	unsigned char key[SV_KEY_MAX];
};

static_assert(sizeof(struct packet) == 264, "the head of a packet has 264 bytes");

enum { OPENED = 'O', FRAME = 'F', LOST = 'L', ACCEPTED = 'A', OVER = 'E', SEND = 'S' };

/* A message with room for one descriptor beside it. */
struct envelope {
	struct msghdr message;
	struct iovec parts[2];
	union {
		struct cmsghdr header;
		char space[CMSG_SPACE(sizeof(int))];
	} control;
};

/* Programs without framed sockets pay nothing for them. */
static atomic_bool has_any;

struct sock *frames_get(int fd)
{
	struct sock *sock = atomic_load_explicit(&has_any, memory_order_acquire) ? sock_get(fd) : NULL;

	if (sock && sock->type != SOCK_SEQPACKET) {
		sock_put(sock);
		sock = NULL;
	}
	return sock;
}

int frames_socket(int flags, int protocol)
{
	struct sock *sock;
	int fd;

	if (protocol)
		return fail(EPROTONOSUPPORT, "the protocol of SOCK_SEQPACKET is 0");
	fd = REAL(socket)(AF_UNIX, SOCK_SEQPACKET | flags, 0);
	if (fd < 0)
		return -1;
	if (sock_add(fd, AF_UNIX, SOCK_SEQPACKET, &sock)) {
		REAL(close)(fd);
		return -1;
	}
	sock_put(sock);
	atomic_store_explicit(&has_any, true, memory_order_release);
	return fd;
}

/* One packet: its head, the length of its payload, of which as much as there is room for is at `data`, and the
 * descriptor that came with it, which is the caller's, or -1. 0: nothing more comes. -1: errno says why not.
 */
static int receive(int fd, struct packet *head, void *data, size_t room, int flags, size_t *length, int *passed)
{
	struct envelope envelope = { .parts = { { head, sizeof(*head) }, { data, room } } };
	struct cmsghdr *control;
	ssize_t got;

	envelope.message = (struct msghdr){ .msg_iov = envelope.parts, .msg_iovlen = 2, .msg_control = &envelope.control,
					    .msg_controllen = sizeof(envelope.control) };
	*passed = -1;
	got = REAL(recvmsg)(fd, &envelope.message, flags | MSG_CMSG_CLOEXEC | MSG_TRUNC);
	if (got <= 0)
		return (int)got;
	if (got < (ssize_t)sizeof(*head))
		return fail(EPROTO, "the program margay speaks another version of this: use program and library of one version");
	*length = (size_t)got - sizeof(*head);
	control = CMSG_FIRSTHDR(&envelope.message);
	if (control && control->cmsg_type == SCM_RIGHTS && control->cmsg_len >= CMSG_LEN(sizeof(int)))
		memcpy(passed, CMSG_DATA(control), sizeof(*passed));
	if (*passed < 0 && envelope.message.msg_flags & MSG_CTRUNC) {
		/* What has come has gone: nobody may believe that nothing was there. */
		shutdown(fd, SHUT_RDWR);
		return fail(EMFILE, "there is no descriptor for a large frame or a connection, so that this socket is over");
	}
	return 1;
}

/* What an end says of itself becomes the error of this call. */
static int end_with(const struct packet *head, const char *text, size_t length)
{
	return fail((int)ntohl(head->number), "%.*s", (int)length, text);
}

static size_t least(size_t one, size_t other)
{
	return one < other ? one : other;
}

/* Has the socket carried. Waits until the other end has answered, or nobody has. */
static int open_by(int fd, const char *verb, const struct sockaddr_sv *name, const char *label)
{
	struct pollfd opened = { .fd = fd, .events = POLLIN };
	char written[TEXT_MAX + 1], text[1024];
	struct packet head;
	size_t length;
	int got, passed;

	if (!sv_ntop(name, written, sizeof(written)) || carrier_start(fd, verb, written, label))
		return -1;
	/* A socket that does not block waits here, too: what comes first is not for the program. */
	while (poll(&opened, 1, -1) < 0 && errno == EINTR)
		;
	got = receive(fd, &head, text, sizeof(text), 0, &length, &passed);
	if (got < 0)
		return -1;
	if (got && head.kind == OVER)
		return end_with(&head, text, least(length, sizeof(text)));
	if (!got || head.kind != OPENED)
		return fail(EPROTO, "the program margay carries no framed sockets: use program and library of one version");
	return 0;
}

int frames_connect(int fd, struct sock *sock, const struct sockaddr *given, socklen_t length)
{
	struct sockaddr_sv address;
	struct section section;
	bool is_taken;

	if (address_read(given, length, &address))
		return -1;
	section_enter(&section, &state_lock);
	is_taken = sock->is_bound || sock->is_accepted || sock->has_peer;
	section_leave(&section, &state_lock);
	if (is_taken)
		return fail(EISCONN, "a framed socket that is bound or connected connects to nobody else: make another one");
	if (open_by(fd, "connect", &address, ""))
		return -1;
	section_enter(&section, &state_lock);
	sock->peer = address_of(&address.sv_srvid);
	sock->has_peer = sock->is_numbered = true;
	section_leave(&section, &state_lock);
	return 0;
}

int frames_bind(struct sock *sock, const struct sockaddr *given, socklen_t length)
{
	struct sockaddr_sv address;
	struct section section;
	bool is_taken;

	if (address_read(given, length, &address))
		return -1;
	section_enter(&section, &state_lock);
	is_taken = sock->is_bound || sock->is_accepted || sock->has_peer;
	if (!is_taken) {
		sock->is_bound = true;
		sock->local = address;
	}
	section_leave(&section, &state_lock);
	return is_taken ? fail(EINVAL, "the socket is bound or connected already") : 0;
}

int frames_listen(int fd, struct sock *sock)
{
	char label[sizeof(sock->label)];
	struct sockaddr_sv local;
	struct section section;
	bool is_bound, is_listening;

	section_enter(&section, &state_lock);
	is_bound = sock->is_bound;
	is_listening = sock->is_listening;
	local = sock->local;
	memcpy(label, sock->label, sizeof(label));
	section_leave(&section, &state_lock);
	if (!is_bound)
		return fail(EDESTADDRREQ, "bind the socket to the name that it shall serve");
	if (is_listening)
		return 0;
	if (open_by(fd, "listen", &local, label))
		return -1;
	section_enter(&section, &state_lock);
	sock->is_listening = true;
	section_leave(&section, &state_lock);
	return 0;
}

int sv_framelabel(int fd, const char *label)
{
	struct sock *sock = frames_get(fd);
	struct section section;
	int result = 0;

	forget_error();
	if (!sock)
		return fail(ENOTSOCK, "this is no socket of AF_SERVAL and SOCK_SEQPACKET");
	if (!label || strlen(label) > SV_LABEL_MAX)
		result = fail(EINVAL, "a label has at most %d bytes", SV_LABEL_MAX);
	section_enter(&section, &state_lock);
	if (!result)
		strcpy(sock->label, label);
	section_leave(&section, &state_lock);
	sock_put(sock);
	return result;
}

/* "sid:" and 64 digits; else a name that is all zero. */
static struct sockaddr_sv who_is(const char *text)
{
	struct service_id id = { 0 };

	for (size_t at = 0; at < sizeof(id.s_sid); at++) {
		if (sscanf(text + 4 + 2 * at, "%2hhx", &id.s_sid[at]) != 1) {
			id = (struct service_id){ 0 };
			break;
		}
	}
	return address_of(&id);
}

int frames_accept(int fd, struct sock *listener, struct sockaddr *address, socklen_t *size, int flags)
{
	char text[1024] = "";
	struct sockaddr_sv client;
	struct section section;
	struct packet head;
	struct sock *sock;
	size_t length;
	int got, passed;
	bool is_listening;

	section_enter(&section, &state_lock);
	is_listening = listener->is_listening;
	section_leave(&section, &state_lock);
	if (!is_listening)
		return fail(EINVAL, "the socket does not listen");
	got = receive(fd, &head, text, WHO_MAX, 0, &length, &passed);
	if (got < 0)
		return -1;
	if (got && head.kind == OVER)
		return end_with(&head, text, least(length, WHO_MAX));
	if (!got || head.kind != ACCEPTED || passed < 0)
		return fail(ECONNABORTED, "the program margay, which carries framed sockets, has ended: make another socket");
	client = who_is(length == 4 + 2 * sizeof(struct service_id) ? text : "");
	if (!(flags & SOCK_CLOEXEC))
		REAL(fcntl)(passed, F_SETFD, 0);
	if (flags & SOCK_NONBLOCK)
		REAL(fcntl)(passed, F_SETFL, O_RDWR | O_NONBLOCK);
	if (sock_add(passed, AF_UNIX, SOCK_SEQPACKET, &sock)) {
		REAL(close)(passed);
		return -1;
	}
	section_enter(&section, &state_lock);
	sock->is_accepted = sock->has_peer = true;
	sock->local = listener->local;
	sock->peer = client;
	section_leave(&section, &state_lock);
	sock_put(sock);
	address_write(&client, address, size);
	return passed;
}

/* A file of memory with these bytes; -1: there is no room for it. */
static int filed(const char *data, size_t length)
{
	int fd = memfd_create("frame", MFD_CLOEXEC);

	for (size_t done = 0; fd >= 0 && done < length;) {
		ssize_t written = REAL(write)(fd, data + done, length - done);

		if (written < 0 && errno != EINTR) {
			REAL(close)(fd);
			fd = -1;
		}
		done += written > 0 ? (size_t)written : 0;
	}
	return fd < 0 ? fail(errno, "there is no room for a frame of %zu bytes", length) : fd;
}

/* Waits for room, as long as the socket does. */
static int await_room(int fd)
{
	struct pollfd room = { .fd = fd, .events = POLLOUT };
	struct timeval limit = { 0 };
	socklen_t length = sizeof(limit);
	int64_t limit_ms;
	int ready;

	getsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &limit, &length);
	limit_ms = limit.tv_sec || limit.tv_usec ? (int64_t)limit.tv_sec * 1000 + (limit.tv_usec + 999) / 1000 : -1;
	ready = poll(&room, 1, limit_ms > INT32_MAX ? INT32_MAX : (int)limit_ms);
	if (!ready)
		errno = EAGAIN;
	return ready > 0 ? 0 : -1;
}

/* Sends a packet with or without waiting; the number that a client's frame has got is that of its place among them. */
static int send_packet(int fd, struct sock *sock, struct envelope *envelope, int flags, uint32_t *number)
{
	const struct packet *head = envelope->parts[0].iov_base;
	bool waits = !(flags & MSG_DONTWAIT) && !(REAL(fcntl)(fd, F_GETFL) & O_NONBLOCK);
	bool is_new = !(head->flags & SV_IS_ANSWER);
	struct section section;
	ssize_t sent;

	do {
		/* Not waiting under the lock, which makes numbers and packets come in one order. */
		section_enter(&section, &state_lock);
		sent = REAL(sendmsg)(fd, &envelope->message, flags | MSG_DONTWAIT);
		if (sent >= 0 && is_new && sock->is_numbered)
			*number = sock->next_number++;
		section_leave(&section, &state_lock);
	} while (sent < 0 && errno == EAGAIN && waits && !await_room(fd));
	return sent < 0 ? -1 : 0;
}

/* Whether a frame can be: 0, or -1 with errno. */
static int check(const struct sock *sock, const struct sv_frame *frame, size_t length)
{
	if (length > SV_FRAME_MAX)
		return fail(EMSGSIZE, "the frame has %zu bytes, and may have %d", length, SV_FRAME_MAX);
	if (frame->sf_order >= STREAMS_MAX && frame->sf_order != SV_UNORDERED)
		return fail(EINVAL, "streams are 1 to %d, and %u is none", STREAMS_MAX - 1, frame->sf_order);
	if (frame->sf_flags & ~(SV_SAFE | SV_WANTS_ANSWER | SV_IS_ANSWER))
		return fail(EINVAL, "a frame that is sent may be SV_SAFE, SV_WANTS_ANSWER or SV_IS_ANSWER, and nothing else");
	if (!sock->has_peer)
		return fail(ENOTCONN, "the socket is not connected");
	return 0;
}

static ssize_t do_send(int fd, struct sock *sock, const void *data, size_t length, struct sv_frame *frame, int flags)
{
	struct packet head = { .kind = SEND, .flags = frame->sf_flags, .order = htons(frame->sf_order),
			       .number = htonl(frame->sf_flags & SV_IS_ANSWER ? frame->sf_number : 0),
			       .key_length = frame->sf_key_length };
	struct envelope envelope = { .parts = { { &head, sizeof(head) }, { (void *)data, length } } };
	int file = -1, result, error;

	if (check(sock, frame, length))
		return -1;
	memcpy(head.key, frame->sf_key, frame->sf_key_length);
	envelope.message = (struct msghdr){ .msg_iov = envelope.parts, .msg_iovlen = 2 };
	if (length > INLINE_MAX) {
		file = filed(data, length);
		if (file < 0)
			return -1;
		envelope.control.header = (struct cmsghdr){ .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS,
							    .cmsg_len = CMSG_LEN(sizeof(int)) };
		memcpy(CMSG_DATA(&envelope.control.header), &file, sizeof(file));
		envelope.message = (struct msghdr){ .msg_iov = envelope.parts, .msg_iovlen = 1,
						    .msg_control = &envelope.control,
						    .msg_controllen = sizeof(envelope.control) };
	}
	result = send_packet(fd, sock, &envelope, flags & (MSG_DONTWAIT | MSG_NOSIGNAL), &frame->sf_number);
	error = errno;
	if (file >= 0)
		REAL(close)(file);
	errno = error;
	return result ? -1 : (ssize_t)length;
}

ssize_t frames_send(int fd, struct sock *sock, const void *data, size_t length, int flags)
{
	struct sv_frame frame = { 0 };

	return do_send(fd, sock, data, length, &frame, flags);
}

ssize_t sv_sendframe(int fd, const void *data, size_t length, struct sv_frame *frame, int flags)
{
	struct sock *sock = frames_get(fd);
	ssize_t result;

	forget_error();
	if (!sock)
		return fail(ENOTSOCK, "this is no socket of AF_SERVAL and SOCK_SEQPACKET");
	result = frame ? do_send(fd, sock, data, length, frame, flags) : frames_send(fd, sock, data, length, flags);
	sock_put(sock);
	return result;
}

/* Reads a large payload, of which no more is given than there is room for; gives its length, or -1. */
static ssize_t read_file(int file, char *data, size_t room)
{
	struct stat about;
	ssize_t got = 1;

	if (fstat(file, &about))
		return -1;
	for (size_t done = 0; done < least(room, (size_t)about.st_size) && got > 0; done += got > 0 ? (size_t)got : 0)
		got = pread(file, data + done, least(room, (size_t)about.st_size) - done, (off_t)done);
	return got < 0 ? -1 : (ssize_t)about.st_size;
}

/* The length of the frame, whatever the room; -1: errno. */
static ssize_t do_receive(int fd, struct sock *sock, void *data, size_t room, struct sv_frame *frame, int flags)
{
	struct packet head;
	struct section section;
	size_t length;
	int got, passed;
	ssize_t large;
	bool has_peer;

	memset(frame, 0, sizeof(*frame));
	section_enter(&section, &state_lock);
	has_peer = sock->has_peer;
	section_leave(&section, &state_lock);
	if (!has_peer)
		return fail(ENOTCONN, "the socket is not connected");
	got = receive(fd, &head, data, room, flags & (MSG_DONTWAIT | MSG_PEEK), &length, &passed);
	if (got < 0)
		return -1;
	if (!got) {
		frame->sf_flags = SV_END;
		return 0;
	}
	if (head.kind == OVER)
		return end_with(&head, data, least(length, room));
	if (passed >= 0) {
		large = read_file(passed, data, room);
		REAL(close)(passed);
		if (large < 0)
			return -1;
		length = (size_t)large;
	}
	frame->sf_number = ntohl(head.number);
	frame->sf_order = ntohs(head.order);
	frame->sf_key_length = head.key_length;
	memcpy(frame->sf_key, head.key, sizeof(frame->sf_key));
	frame->sf_flags = head.kind == LOST ? SV_LOST : (uint8_t)(head.flags | (length > room ? SV_CUT : 0));
	return (ssize_t)length;
}

ssize_t frames_receive(int fd, struct sock *sock, void *data, size_t room, int flags, bool *is_cut)
{
	struct sv_frame frame;
	ssize_t length = do_receive(fd, sock, data, room, &frame, flags);

	*is_cut = length >= 0 && frame.sf_flags & SV_CUT;
	if (length >= 0 && frame.sf_flags & SV_LOST)
		return fail(EREMOTEIO, "the server died with frame %u: it may have acted on it, or not; the connection goes on",
			    frame.sf_number);
	return flags & MSG_TRUNC || length < 0 ? length : (ssize_t)least((size_t)length, room);
}

ssize_t sv_recvframe(int fd, void *data, size_t room, struct sv_frame *frame, int flags)
{
	struct sock *sock = frames_get(fd);
	ssize_t length;

	forget_error();
	if (!sock)
		return fail(ENOTSOCK, "this is no socket of AF_SERVAL and SOCK_SEQPACKET");
	length = do_receive(fd, sock, data, room, frame, flags);
	sock_put(sock);
	return flags & MSG_TRUNC || length < 0 ? length : (ssize_t)least((size_t)length, room);
}

static size_t length_of(const struct msghdr *message)
{
	size_t length = 0;

	for (size_t at = 0; at < message->msg_iovlen; at++)
		length += message->msg_iov[at].iov_len;
	return length;
}

/* The parts as one, or the other way round. */
static void copy_parts(const struct msghdr *message, char *whole, size_t length, bool gathers)
{
	for (size_t at = 0, done = 0; at < message->msg_iovlen && done < length; at++) {
		size_t part = least(message->msg_iov[at].iov_len, length - done);

		if (gathers)
			memcpy(whole + done, message->msg_iov[at].iov_base, part);
		else
			memcpy(message->msg_iov[at].iov_base, whole + done, part);
		done += part;
	}
}

ssize_t frames_sendmsg(int fd, struct sock *sock, const struct msghdr *message, int flags)
{
	size_t length = length_of(message);
	ssize_t result;
	char *whole;

	if (message->msg_controllen)
		return fail(EOPNOTSUPP, "a framed socket passes no control messages");
	if (message->msg_iovlen == 1)
		return frames_send(fd, sock, message->msg_iov[0].iov_base, length, flags);
	whole = length <= SV_FRAME_MAX ? malloc(length + 1) : NULL;
	if (!whole)
		return fail(EMSGSIZE, "the frame has %zu bytes, and may have %d", length, SV_FRAME_MAX);
	copy_parts(message, whole, length, true);
	result = frames_send(fd, sock, whole, length, flags);
	free(whole);
	return result;
}

ssize_t frames_recvmsg(int fd, struct sock *sock, struct msghdr *message, int flags)
{
	size_t room = least(length_of(message), SV_FRAME_MAX);
	bool is_cut = false;
	ssize_t got;
	char *whole;

	message->msg_controllen = 0;
	message->msg_namelen = 0;
	if (message->msg_iovlen == 1) {
		got = frames_receive(fd, sock, message->msg_iov[0].iov_base, room, flags, &is_cut);
	} else {
		whole = malloc(room + 1);
		if (!whole)
			return fail(ENOMEM, "no memory for a frame");
		got = frames_receive(fd, sock, whole, room, flags, &is_cut);
		copy_parts(message, whole, got > 0 ? least((size_t)got, room) : 0, false);
		free(whole);
	}
	if (got >= 0)
		message->msg_flags = MSG_EOR | (is_cut ? MSG_TRUNC : 0);
	return got;
}

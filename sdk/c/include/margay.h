/* SPDX-License-Identifier: Apache-2.0
 *
 * BSD sockets with serviceIDs (Serval, table 1): socket, bind, listen, connect, accept, send, recv, sendto, recvfrom,
 * getsockname, getpeername, close. Linked against libmargay the calls begin with sv_; under libmargay-preload.so, or
 * with MARGAY_BSD_NAMES defined before this header, they have their own names. Beside them, sockets go from one process
 * to the next. See margay(3).
 */
#ifndef MARGAY_H
#define MARGAY_H

#include <stddef.h>
#include <stdint.h>
#include <sys/socket.h>
#include <sys/types.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The family. No kernel gives it a meaning: Linux has used 46 numbers in thirty years, and this is far from them. */
#define AF_SERVAL 254
#define PF_SERVAL AF_SERVAL

#define SERVICE_ID_BITS 256

/* The name of a service, its most significant bit first. */
struct service_id {
	union {
		uint8_t s_sid[SERVICE_ID_BITS / 8];
		uint16_t s_sid16[SERVICE_ID_BITS / 16];
		uint32_t s_sid32[SERVICE_ID_BITS / 32];
	};
};

/* What the calls take and give as an address. */
struct sockaddr_sv {
	sa_family_t sv_family; /* AF_SERVAL */
	uint8_t sv_flags; /* zero */
	uint8_t sv_prefix_bits; /* how many leading bits count, 1 to 255; 0: all 256 */
	struct service_id sv_srvid; /* bits beyond the prefix are zero */
};

/* "sid:", 64 digits, "/255", and the end; or a written name of at most 200 bytes. */
#define SV_STRLEN 204

/* As their namesakes without sv_, for sockets of AF_SERVAL; others are passed on. */
int sv_socket(int domain, int type, int protocol);
int sv_bind(int fd, const struct sockaddr *address, socklen_t length);
int sv_listen(int fd, int backlog);
int sv_connect(int fd, const struct sockaddr *address, socklen_t length);
int sv_accept(int fd, struct sockaddr *address, socklen_t *length);
int sv_accept4(int fd, struct sockaddr *address, socklen_t *length, int flags);
ssize_t sv_send(int fd, const void *data, size_t length, int flags);
ssize_t sv_recv(int fd, void *data, size_t length, int flags);
ssize_t sv_sendto(int fd, const void *data, size_t length, int flags, const struct sockaddr *address, socklen_t size);
ssize_t sv_recvfrom(int fd, void *data, size_t length, int flags, struct sockaddr *address, socklen_t *size);
ssize_t sv_sendmsg(int fd, const struct msghdr *message, int flags);
ssize_t sv_recvmsg(int fd, struct msghdr *message, int flags);
int sv_getsockname(int fd, struct sockaddr *address, socklen_t *length);
int sv_getpeername(int fd, struct sockaddr *address, socklen_t *length);
int sv_dup(int fd);
int sv_dup2(int fd, int to);
int sv_close(int fd);

/* The address of a written name: "web.shop", "web.shop/key:user42", "sid:0011/16". 0, or -1 with errno. */
int sv_name(const char *written, struct sockaddr_sv *address);

/* An address as text: a name that this process has looked up, or sid:<hex>[/bits]. NULL with ENOSPC where SV_STRLEN is
 * needed.
 */
const char *sv_ntop(const struct sockaddr_sv *address, char *text, size_t size);

/* How much a program may say of a socket that it gives away. */
#define SV_HANDOVER_MAX_BYTES 1048576

/* Gives a TCP socket, connected or listening, to another process of this user that takes over its name, with `length`
 * bytes that this one has to know. `to`: the name or host-ID of a host, to which the connection of an accepted socket
 * goes; NULL or an empty text: another process of this host, or, where none takes over the name, any other host that
 * serves it. 0: the other one has it, and `fd` is closed. -1: `fd` is still the caller's, but with ECONNABORTED, where
 * nobody has it, or can say who has it: then it is closed, too. It may take 45 seconds.
 */
int sv_handover(int fd, const char *to, const void *data, size_t length);

/* Takes over sockets of this name, or prefix: a descriptor for sv_take, poll and epoll, until it is closed; or -1. */
int sv_takeover(const struct sockaddr *name, socklen_t length);

/* The next socket that was given; waits for one, where the descriptor does not say O_NONBLOCK. `room` bytes at most of
 * what its giver says of it, and how many there are. -1: with ECONNABORTED it was too late for one, and with ESHUTDOWN
 * there will be no more of this descriptor.
 */
int sv_take(int takeover, void *data, size_t room, size_t *length);

/* What a program is asked to give: all of a name, since an operator drains it on this host, or one connection, since
 * another host has fewer than its share.
 */
struct sv_give {
	struct sockaddr_sv name; /* connections that came by this name, or by one under this prefix */
	char to[256]; /* for sv_handover: the host that gets them; empty: any that serves the name */
	unsigned char peer[16]; /* with peer_port: the one that is meant, by its peer's IPv6 address; IPv4 is v4-mapped */
	uint16_t peer_port; /* 0: all of them */
};

/* Whether a connection with this peer is meant: 1 or 0; or -1, where the descriptor is not connected. */
int sv_gives(const struct sv_give *give, int fd);

/* What sv_take_giving returns for it. */
#define SV_GIVE (-2)

/* As sv_takeover, of a program that gives its own connections to another host when it is asked to: for sv_take_giving.
 */
int sv_takeover_giving(const struct sockaddr *name, socklen_t length);

/* As sv_take; or SV_GIVE: no socket has come, and the program is asked for what `give` says. It gives each connection
 * of that name for which sv_gives is 1 with sv_handover, and goes on with those that stay.
 */
int sv_take_giving(int takeover, void *data, size_t room, size_t *length, struct sv_give *give);

/* The whole weight. */
#define SV_LOAD_MAX_PERCENT 100

/* Says how much of its weight this process is to keep for a name, or prefix, that it serves: `percent` is 0 to 100, and
 * with 0 no new connection comes. It holds until the next report of the name, and for as long as the process and its
 * agent live: then, and after exec, the whole weight is back. 0; or -1 with errno: ENOENT where this process does not
 * serve the name, EACCES without the right to bind it, EOPNOTSUPP of an agent of an earlier release, EBUSY while
 * another thread reports.
 */
int sv_report_load(const struct sockaddr *name, socklen_t length, unsigned int percent);

/* Leaves between two TCP connections, `left` that the program has accepted by a name and `right` that it has opened to
 * one: they become one connection, without the program. All that was read of either has been written to the other one,
 * and nothing is read or written from now on. 0: both descriptors are closed, and the agent relays between the two
 * until they are one, or for as long as they cannot be. -1: both are still the caller's, but with ECONNABORTED, where
 * nobody can say who relays: then they are closed, too.
 */
int sv_splice(int left, int right);

/* Has a session go through these boxes next, before the rest of its chain: for the program of a box. `boxes`: their
 * names in order, with spaces between them, 255 bytes at most. `protocol`: IPPROTO_TCP or IPPROTO_UDP. `from` and `to`:
 * source and destination of the session's first packet as it has come to the box by sal0, both of AF_INET or both of
 * AF_INET6, of `length` bytes each. The box must not have let that packet out; as long as it keeps the packet, for a
 * second at most, the last call counts, and the same call again does nothing. 0: the packet may go on. -1: nothing has
 * changed; errno is ENOTCONN where no such session has come to a box of this host, EACCES where the program is not that
 * box's, EPERM where the policy does not let the box be added, EALREADY where the packet has left the box, E2BIG for
 * more than eight boxes, EINVAL for a name that is no box's or that the session passes already, EOPNOTSUPP of an agent
 * of an earlier release.
 */
int sv_pass_next(const char *boxes, int protocol, const struct sockaddr *from, const struct sockaddr *to,
		 socklen_t length);

/* Framed sockets: SOCK_SEQPACKET. Frames arrive whole, each to one server, of one server or of an ensemble of them.
 * sv_send and sv_recv send and receive them as they are unless said otherwise; the program margay carries them, and
 * must be in PATH, or named by MARGAY_PROGRAM.
 */

/* Bytes of the longest frame, of the longest key, and of the longest label. */
#define SV_FRAME_MAX 8388608
#define SV_KEY_MAX 255
#define SV_LABEL_MAX 64

/* As an order: behind the frames before it that go to the same server; nowhere. 1 to 255 are streams, each of which
 * goes to one server.
 */
#define SV_PER_SERVER 0
#define SV_UNORDERED 0xffff

/* As flags. Another server may be given it, where nobody knows whether its own acted on it before it died. */
#define SV_SAFE 1
/* A server that is drained stays until it has answered; SV_LOST tells that no answer will come. */
#define SV_WANTS_ANSWER 2
/* It answers the frame with its number. */
#define SV_IS_ANSWER 4
/* No frame: the server that had the one of this number died with it, and may have acted on it, or not. */
#define SV_LOST 8
/* No frame, and none will come: the other end has closed the connection. */
#define SV_END 16
/* It was longer than the room. */
#define SV_CUT 32

/* What is said of a frame. All zero is what sv_send says. */
struct sv_frame {
	uint32_t sf_number; /* a client's frame's own; of an answer, that of what it answers; else zero */
	uint16_t sf_order;
	uint8_t sf_flags;
	uint8_t sf_key_length;
	unsigned char sf_key[SV_KEY_MAX]; /* what an ensemble chooses the server by; none: one after the other */
};

/* As sv_send, with what is said of the frame. A client's gets its number there, unless it is an answer. `frame` may be
 * NULL.
 */
ssize_t sv_sendframe(int fd, const void *data, size_t length, struct sv_frame *frame, int flags);

/* As sv_recv, with what is said of the frame. sf_flags says what else it may be: SV_LOST, SV_END. */
ssize_t sv_recvframe(int fd, void *data, size_t room, struct sv_frame *frame, int flags);

/* What a member of an ensemble is called where keys are divided, before sv_listen: its host's name, unless said. */
int sv_framelabel(int fd, const char *label);

/* Why the last call of this thread failed, and what to do; an empty text where errno says all. */
const char *sv_strerror(void);

#ifdef MARGAY_BSD_NAMES
#define socket(domain, type, protocol) sv_socket(domain, type, protocol)
#define bind(fd, address, length) sv_bind(fd, address, length)
#define listen(fd, backlog) sv_listen(fd, backlog)
#define connect(fd, address, length) sv_connect(fd, address, length)
#define accept(fd, address, length) sv_accept(fd, address, length)
#define accept4(fd, address, length, flags) sv_accept4(fd, address, length, flags)
#define send(fd, data, length, flags) sv_send(fd, data, length, flags)
#define recv(fd, data, length, flags) sv_recv(fd, data, length, flags)
#define sendto(fd, data, length, flags, address, size) sv_sendto(fd, data, length, flags, address, size)
#define recvfrom(fd, data, length, flags, address, size) sv_recvfrom(fd, data, length, flags, address, size)
#define sendmsg(fd, message, flags) sv_sendmsg(fd, message, flags)
#define recvmsg(fd, message, flags) sv_recvmsg(fd, message, flags)
#define getsockname(fd, address, length) sv_getsockname(fd, address, length)
#define getpeername(fd, address, length) sv_getpeername(fd, address, length)
#define dup(fd) sv_dup(fd)
#define dup2(fd, to) sv_dup2(fd, to)
#define close(fd) sv_close(fd)
#endif

#ifdef __cplusplus
}
#endif

#endif

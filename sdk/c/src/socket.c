/* SPDX-License-Identifier: Apache-2.0
 *
 * The calls on sockets: a socket of AF_SERVAL is a socket of the kernel's TCP or UDP, for both families, at a port that
 * nobody needs to know; poll, select, epoll, send, recv, read, write and shutdown are the kernel's own.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <string.h>

#include "internal.h"

/* Whether the kernel has an address: it lets nobody be bound to one that it has not. */
static bool has_address(int family, const void *address, socklen_t length)
{
	int fd = REAL(socket)(family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
	bool has = fd >= 0 && !REAL(bind)(fd, address, length);

	if (fd >= 0)
		REAL(close)(fd);
	return has;
}

/* IPv6 takes both; where it is switched off, names have IPv4 addresses alone. */
static int choose_family(void)
{
	const struct own_ends own = address_own();
	const struct sockaddr_in6 v6 = { .sin6_family = AF_INET6, .sin6_addr = own.v6 };
	const struct sockaddr_in v4 = { .sin_family = AF_INET, .sin_addr = own.v4 };

	if (has_address(AF_INET6, &v6, sizeof(v6)))
		return AF_INET6;
	return has_address(AF_INET, &v4, sizeof(v4)) ? AF_INET : AF_INET6;
}

static int make_socket(int type, int flags, int protocol, int *family)
{
	int off = 0, fd;

	*family = choose_family();
	fd = REAL(socket)(*family, type | flags, protocol);
	if (fd < 0 && errno == EAFNOSUPPORT && *family == AF_INET6) {
		*family = AF_INET;
		fd = REAL(socket)(*family, type | flags, protocol);
	}
	if (fd < 0)
		return fd;
	if (*family == AF_INET6)
		setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof(off));
	return fd;
}

int sv_socket(int domain, int type, int protocol)
{
	int flags = type & (SOCK_CLOEXEC | SOCK_NONBLOCK), kind = type & ~flags, wanted, family, fd;
	struct sock *sock;

	forget_error();
	if (domain != AF_SERVAL)
		return REAL(socket)(domain, type, protocol);
	if (kind == SOCK_SEQPACKET)
		return frames_socket(flags, protocol);
	if (kind != SOCK_STREAM && kind != SOCK_DGRAM)
		return fail(ESOCKTNOSUPPORT, "sockets of AF_SERVAL are SOCK_STREAM, SOCK_DGRAM or SOCK_SEQPACKET");
	wanted = kind == SOCK_STREAM ? IPPROTO_TCP : IPPROTO_UDP;
	if (protocol && protocol != wanted)
		return fail(EPROTONOSUPPORT, "the protocol of this type is %d; 0 stands for it", wanted);
	fd = make_socket(kind, flags, wanted, &family);
	if (fd < 0)
		return -1;
	if (sock_add(fd, family, kind, &sock)) {
		REAL(close)(fd);
		return -1;
	}
	sock_put(sock);
	return fd;
}

/* The port of the kernel's socket; 0: none yet, -1: an error. */
static int port_of(int fd)
{
	struct sockaddr_storage own;
	socklen_t length = sizeof(own);
	uint16_t port;

	if (REAL(getsockname)(fd, (struct sockaddr *)&own, &length))
		return -1;
	address_mapped(&own, &port);
	return port;
}

int socket_ensure_port(int fd, const struct sock *sock)
{
	const struct sockaddr_in6 any6 = { .sin6_family = AF_INET6 };
	const struct sockaddr_in any4 = { .sin_family = AF_INET };
	int port = port_of(fd), failed;

	if (port)
		return port < 0 ? -1 : 0;
	if (sock->family == AF_INET6)
		failed = REAL(bind)(fd, (const struct sockaddr *)&any6, sizeof(any6));
	else
		failed = REAL(bind)(fd, (const struct sockaddr *)&any4, sizeof(any4));
	return failed;
}

/* Lets the socket serve what it is bound to. */
static int ask_to_serve(int fd, const struct sock *sock, const struct sockaddr_sv *address)
{
	char text[TEXT_MAX + 1];
	struct request request = {
		.kind = ASK_BIND, .protocol = sock_protocol(sock), .bits = bits_of(address), .id = address->sv_srvid, .fd = fd
	};
	struct reply reply;

	name_find(&request.id, request.bits, text);
	request.text = text;
	return agent_ask(&request, &reply);
}

static int do_bind(int fd, struct sock *sock, const struct sockaddr *given, socklen_t length)
{
	struct sockaddr_sv address;
	struct section section;
	bool is_bound;

	if (address_read(given, length, &address))
		return -1;
	section_enter(&section, &state_lock);
	is_bound = sock->is_bound || sock->is_accepted;
	section_leave(&section, &state_lock);
	if (is_bound)
		return fail(EINVAL, "the socket is bound already");
	if (socket_ensure_port(fd, sock) || ask_to_serve(fd, sock, &address))
		return -1;
	section_enter(&section, &state_lock);
	sock->is_bound = true;
	sock->is_named = false;
	sock->local = address;
	section_leave(&section, &state_lock);
	return 0;
}

int sv_bind(int fd, const struct sockaddr *address, socklen_t length)
{
	struct sock *sock = sock_get(fd);
	int result;

	forget_error();
	if (!sock)
		return REAL(bind)(fd, address, length);
	result = sock->type == SOCK_SEQPACKET ? frames_bind(sock, address, length) : do_bind(fd, sock, address, length);
	sock_put(sock);
	return result;
}

int sv_listen(int fd, int backlog)
{
	struct sock *sock = sock_get(fd);
	struct sockaddr_sv local;
	struct section section;
	bool is_bound;
	int result;

	forget_error();
	if (!sock)
		return REAL(listen)(fd, backlog);
	if (sock->type == SOCK_SEQPACKET) {
		result = frames_listen(fd, sock);
		sock_put(sock);
		return result;
	}
	section_enter(&section, &state_lock);
	is_bound = sock->is_bound;
	local = sock->local;
	section_leave(&section, &state_lock);
	if (!is_bound)
		result = fail(EDESTADDRREQ, "bind the socket to the name that it shall serve");
	/* Again: the agent may have been started anew since, and knows nothing of sockets that did not listen yet. */
	else if (sock->type == SOCK_STREAM && ask_to_serve(fd, sock, &local))
		result = -1;
	else
		result = REAL(listen)(fd, backlog);
	sock_put(sock);
	return result;
}

int socket_ensure_name(int fd, struct sock *sock)
{
	struct request request = { .kind = ASK_SOURCE, .protocol = sock_protocol(sock), .bits = SERVICE_ID_BITS, .fd = fd };
	struct section section;
	struct reply reply;
	bool is_named, has_changed = false;
	int port;

	if (socket_ensure_port(fd, sock))
		return -1;
	port = port_of(fd);
	if (port < 0)
		return -1;
	request.port = (uint16_t)port;
	do {
		section_enter(&section, &state_lock);
		/* Zero: a name of its own. A prefix is called by its first name. Whoever has a name keeps it. */
		request.id = sock->local.sv_srvid;
		is_named = sock->is_named && sock->named_on == agent_connection() && !has_changed;
		section_leave(&section, &state_lock);
		if (is_named)
			return 0;
		if (agent_ask(&request, &reply))
			return -1;
		section_enter(&section, &state_lock);
		/* Another thread has asked at the same time and was first: its name is the one, and the agent is told
		 * so last.
		 */
		has_changed = memcmp(&request.id, &sock->local.sv_srvid, sizeof(request.id));
		if (!has_changed) {
			sock->is_named = true;
			sock->named_on = agent_connection();
			if (!sock->is_bound)
				sock->local = address_of(&reply.id);
		}
		section_leave(&section, &state_lock);
	} while (has_changed);
	return 0;
}

static bool is_of_no_route(int error)
{
	return error == ENETUNREACH || error == EADDRNOTAVAIL || error == EHOSTUNREACH || error == EAFNOSUPPORT;
}

static int do_connect(int fd, struct sock *sock, const struct sockaddr *given, socklen_t length)
{
	struct sockaddr_sv address;
	struct known choices[2];
	struct section section;
	int result;

	if (address_read(given, length, &address) || socket_ensure_name(fd, sock) || address_resolve(sock, &address, choices))
		return -1;
	/* Known before the kernel is asked: a connect that does not wait has a peer at once. */
	section_enter(&section, &state_lock);
	sock->peer = address_of(&address.sv_srvid);
	sock->has_peer = true;
	section_leave(&section, &state_lock);
	result = REAL(connect)(fd, (const struct sockaddr *)&choices[0].address, choices[0].length);
	if (result && is_of_no_route(errno) && choices[1].length)
		result = REAL(connect)(fd, (const struct sockaddr *)&choices[1].address, choices[1].length);
	return result;
}

int sv_connect(int fd, const struct sockaddr *address, socklen_t length)
{
	struct sock *sock = sock_get(fd);
	struct section section;
	int result;

	forget_error();
	if (!sock)
		return REAL(connect)(fd, address, length);
	if (sock->type == SOCK_SEQPACKET) {
		result = frames_connect(fd, sock, address, length);
	} else if (address && length >= sizeof(sa_family_t) && address->sa_family == AF_UNSPEC) {
		result = REAL(connect)(fd, address, length);
		section_enter(&section, &state_lock);
		sock->has_peer = sock->has_peer && result;
		section_leave(&section, &state_lock);
	} else {
		result = do_connect(fd, sock, address, length);
	}
	sock_put(sock);
	return result;
}

int socket_peer(int fd, const struct sock *sock, const struct sockaddr_storage *address, struct service_id *id)
{
	struct request request = { .kind = ASK_PEER, .protocol = sock_protocol(sock), .bits = SERVICE_ID_BITS, .fd = fd };
	struct reply reply;

	request.address = address_mapped(address, &request.port);
	if (agent_ask(&request, &reply))
		return -1;
	*id = reply.id;
	return 0;
}

/* What an accepted connection is. Where nobody knows its client any more, it is gone by now, and its name is all zero.
 */
static int enter_accepted(int fd, struct sock *listener, const struct sockaddr_storage *peer, struct sockaddr_sv *client)
{
	struct service_id id = { 0 };
	struct section section;
	struct sock *sock;

	if (sock_add(fd, listener->family, SOCK_STREAM, &sock))
		return -1;
	if (socket_peer(fd, sock, peer, &id))
		forget_error();
	*client = address_of(&id);
	section_enter(&section, &state_lock);
	sock->is_accepted = sock->has_peer = true;
	sock->local = listener->local;
	sock->peer = *client;
	section_leave(&section, &state_lock);
	sock_put(sock);
	return 0;
}

/* Whether a connection came by a name. The port is open to the network as any is; what comes there by an address is
 * nobody's.
 */
static bool came_by_name(int fd)
{
	struct sockaddr_storage own;
	socklen_t length = sizeof(own);

	return !REAL(getsockname)(fd, (struct sockaddr *)&own, &length) && address_is_virtual(&own);
}

int sv_accept4(int fd, struct sockaddr *address, socklen_t *length, int flags)
{
	struct sock *sock = sock_get(fd);
	struct sockaddr_storage peer;
	socklen_t size = sizeof(peer);
	struct sockaddr_sv client;
	int accepted;

	forget_error();
	if (!sock)
		return REAL(accept4)(fd, address, length, flags);
	if (sock->type == SOCK_SEQPACKET) {
		accepted = frames_accept(fd, sock, address, length, flags);
		sock_put(sock);
		return accepted;
	}
	while ((accepted = REAL(accept4)(fd, (struct sockaddr *)&peer, &size, flags)) >= 0 && !came_by_name(accepted)) {
		REAL(close)(accepted);
		size = sizeof(peer);
	}
	if (accepted >= 0 && enter_accepted(accepted, sock, &peer, &client)) {
		REAL(close)(accepted);
		accepted = -1;
	}
	if (accepted >= 0)
		address_write(&client, address, length);
	sock_put(sock);
	return accepted;
}

int sv_accept(int fd, struct sockaddr *address, socklen_t *length)
{
	return sv_accept4(fd, address, length, 0);
}

int sv_getsockname(int fd, struct sockaddr *address, socklen_t *length)
{
	struct sock *sock = sock_get(fd);
	struct section section;
	struct sockaddr_sv local;

	forget_error();
	if (!sock)
		return REAL(getsockname)(fd, address, length);
	section_enter(&section, &state_lock);
	local = sock->local;
	section_leave(&section, &state_lock);
	sock_put(sock);
	if (!address || !length)
		return fail(EFAULT, "there is no room for an address");
	/* Of a socket without a name all zero, as of others the address is. */
	local.sv_family = AF_SERVAL;
	address_write(&local, address, length);
	return 0;
}

int sv_getpeername(int fd, struct sockaddr *address, socklen_t *length)
{
	struct sock *sock = sock_get(fd);
	struct sockaddr_storage kernel;
	socklen_t size = sizeof(kernel);
	struct section section;
	struct sockaddr_sv peer;
	bool has_peer;

	forget_error();
	if (!sock)
		return REAL(getpeername)(fd, address, length);
	section_enter(&section, &state_lock);
	peer = sock->peer;
	has_peer = sock->has_peer;
	section_leave(&section, &state_lock);
	sock_put(sock);
	if (!address || !length)
		return fail(EFAULT, "there is no room for an address");
	/* Whether it is connected the kernel knows. */
	if (REAL(getpeername)(fd, (struct sockaddr *)&kernel, &size))
		return -1;
	if (!has_peer)
		return fail(ENOTCONN, "the socket is not connected");
	address_write(&peer, address, length);
	return 0;
}

int sv_close(int fd)
{
	forget_error();
	sock_remove(fd);
	return REAL(close)(fd);
}

int sv_dup(int fd)
{
	int copy = REAL(dup)(fd);

	forget_error();
	if (copy >= 0)
		sock_copy(fd, copy);
	return copy;
}

int sv_dup2(int fd, int to)
{
	int copy = REAL(dup2)(fd, to);

	forget_error();
	if (copy >= 0)
		sock_copy(fd, copy);
	return copy;
}

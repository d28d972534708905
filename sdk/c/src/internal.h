/* SPDX-License-Identifier: Apache-2.0
 *
 * Between the parts of the library. Reading order: common.c, agent.c (what is asked of the agent), table.c (which
 * descriptors are ours), name.c, address.c (serviceIDs and kernel addresses), socket.c and datagram.c (the calls),
 * frames.c (framed sockets) and carrier.c (the process that carries them),
 * handover.c (sockets from one process to the next), splice.c (two connections become one), load.c (how loaded the
 * process is), next.c (the next boxes of a session), preload.c (the calls under their own names), relay.c (what the
 * shim sees of programs that relay).
 */
#ifndef MARGAY_INTERNAL_H
#define MARGAY_INTERNAL_H

#include <netinet/in.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/socket.h>
#include <time.h>

#include "margay.h"
#include "real.h"

#define TEXT_MAX 255

/* agent.c: see the book's page on the program socket. */

enum request_kind {
	ANY, /* none: whatever has come */
	ASK_NAME = 1,
	ASK_RESOLVE,
	ASK_BIND,
	ASK_SOURCE,
	ASK_PEER,
	ASK_RANGES = 8,
	ASK_HAND_OVER,
	ASK_TAKE_OVER,
	HANDED,
	GIVE,
	ASK_LOAD = 15,
	ASK_NEXT,
	ASK_SPLICE = 75
};

struct request {
	enum request_kind kind;
	uint8_t protocol;
	uint16_t port;
	uint16_t bits;
	struct service_id id;
	struct in6_addr address; /* IPv4: v4-mapped */
	const char *text; /* NULL: none */
	int fd; /* a socket that goes with it; -1: none */
};

struct reply {
	uint8_t kind;
	uint16_t bits;
	uint16_t port;
	struct service_id id;
	struct in6_addr v6;
	struct in_addr v4;
	char text[TEXT_MAX + 1];
};

/* 0, or -1 with errno and the thread's text of the error. */
int agent_ask(const struct request *request, struct reply *reply);

/* The same for a request that is never sent twice, with a file after the socket (-1: none). `is_unknown`, after an
 * error: it was sent, and nobody can say whether it was carried out.
 */
int agent_give(const struct request *request, int file, bool *is_unknown);

/* Milliseconds of the monotonic clock. */
int64_t now_ms(void);

/* Who relays between two connections until they are one: the port of a request. */
#define SPLICE_AGENT_RELAYS 0
#define SPLICE_PROGRAM_RELAYS 1

/* Asks for one connection in the place of two. `is_unknown` as above. */
int agent_splice(int left, int right, uint16_t who_relays, bool *is_unknown);

/* A connection for what the agent says unasked, after a request that it has granted: its descriptor, or -1. */
int agent_open(const struct request *request);
/* The next message of it, of any kind, and its first two descriptors, close-on-exec; -1: none. After an error there are
 * none.
 */
int agent_next(int fd, struct reply *reply, int passed[2]);
/* Says something to which no reply comes: 0, or -1 with errno alone where it was not sent. */
int agent_answer(int fd, const struct request *request);
/* Nothing more comes or goes, at once, though its descriptor stays open. errno stays. */
void agent_end(int fd);

/* The same on a connection of its own, which stays open as long as the process does: what is said there holds as long.
 */
int agent_report(const struct request *request, struct reply *reply);

/* Which connection is the latest: what was said before it was made the agent of now may not know. */
unsigned int agent_connection(void);
/* In a child of fork. */
void agent_forget(void);

/* common.c */

/* Sets errno and the text of the error; gives -1. */
__attribute__((format(printf, 2, 3))) int fail(int error, const char *format, ...);
/* The error is errno's alone. */
void forget_error(void);

/* In the order in which they are taken: what sockets and names are, the connections to the agent, the table. None is
 * held over anything that waits.
 */
extern pthread_mutex_t state_lock, agent_lock, table_lock;

/* Sections that a signal handler or the cancellation of a thread must not interrupt, since they hold a lock. */
struct section {
	sigset_t signals;
	int cancel;
};
void section_enter(struct section *section, pthread_mutex_t *lock);
void section_leave(const struct section *section, pthread_mutex_t *lock);

/* table.c */

#define CACHE_MAX 64

/* A serviceID and the kernel's address that stands for it. */
struct known {
	struct service_id id;
	struct sockaddr_storage address;
	socklen_t length;
	time_t until; /* of the monotonic clock */
};

/* What a datagram socket knows; the oldest goes first. */
struct cache {
	struct known entries[CACHE_MAX];
	unsigned int next;
};

/* A socket of AF_SERVAL, shared by its descriptors. What may change is under the lock of the state. */
struct sock {
	unsigned int references; /* of the table and of calls; under the table's lock */
	uint64_t inode; /* which socket the descriptor was: it may have been closed behind our back */
	int family; /* of the kernel's socket */
	int type;
	bool is_bound, is_named, has_peer, is_accepted;
	/* Of framed sockets alone: it listens; its frames have numbers, and the next one; what a member is called. */
	bool is_listening, is_numbered;
	uint32_t next_number;
	char label[SV_LABEL_MAX + 1];
	unsigned int named_on; /* which connection to the agent */
	struct sockaddr_sv local; /* bound to, or named by the agent */
	struct sockaddr_sv peer;
	struct cache *targets; /* whom this socket sends to */
	struct cache *askers; /* who sends to it */
};

/* The socket behind a descriptor, to be given back with sock_put; NULL: not ours. */
struct sock *sock_get(int fd);
void sock_put(struct sock *sock);
/* Enters a new socket, whose first reference is the table's. */
int sock_add(int fd, int family, int type, struct sock **added);
/* The descriptor is a copy of another, or of none that is ours. */
void sock_copy(int from, int to);
void sock_remove(int fd);
/* The table is of this process: at its start, and in a child of fork. */
void table_adopt(void);
/* Whether this is a child of vfork, which has the parent's memory and descriptors of its own: what it closes is the
 * parent's still.
 */
bool table_is_borrowed(void);

static inline uint8_t sock_protocol(const struct sock *sock)
{
	return sock->type == SOCK_STREAM ? IPPROTO_TCP : IPPROTO_UDP;
}

/* name.c */

/* The written name of these bits, if this process has looked it up; else "". */
void name_find(const struct service_id *id, uint16_t bits, char text[TEXT_MAX + 1]);

/* address.c */

static inline uint16_t bits_of(const struct sockaddr_sv *address)
{
	return address->sv_prefix_bits ? address->sv_prefix_bits : SERVICE_ID_BITS;
}

/* Reads an argument of a call: 0, or -1 with errno. */
int address_read(const struct sockaddr *given, socklen_t length, struct sockaddr_sv *address);
/* Writes a result as the kernel does: cut where there is no room, with the length that it has. */
void address_write(const struct sockaddr_sv *address, struct sockaddr *to, socklen_t *length);
struct sockaddr_sv address_of(const struct service_id *id);
/* The kernel's address as the agent takes it. */
struct in6_addr address_mapped(const struct sockaddr_storage *address, uint16_t *port);
/* Looks the name up and gives where the kernel's socket finds it: the first choice, and the second, of length 0 where
 * there is none.
 */
int address_resolve(const struct sock *sock, const struct sockaddr_sv *name, struct known choices[2]);
/* The host's own virtual addresses. All virtual ones begin with the first 15 bits of the one, or the first 32 of the
 * other.
 */
struct own_ends {
	struct in_addr v4;
	struct in6_addr v6;
};
struct own_ends address_own(void);
/* Whether it is of the ranges that stand for names and for hosts' own ends. */
bool address_is_virtual(const struct sockaddr_storage *address);
bool address_equal(const struct sockaddr_storage *one, const struct sockaddr_storage *other);
time_t address_now(void);

/* relay.c, of the shim alone. Nothing is done, and nothing is known, where the operator has named no port. */

/* Before any other. */
void relay_start(void);
/* A descriptor was accepted, or is no socket of before any more; or all from `first` to `last` are none. */
void relay_accepted(int fd);
void relay_forget(int fd);
void relay_forget_all(unsigned int first, unsigned int last);
/* A call that reads from a descriptor, or writes to it, begins: the caller ends it by one of the functions below. Where
 * the agent is being asked about the socket, this waits for the answer. NULL: nothing is counted.
 */
struct end *relay_begin(int fd);
/* Nothing was read or written. */
void relay_end(struct end *end);
/* So many bytes came out of a socket, or into one, by a call with room for `wanted`; errno is that of the call. */
void relay_read(struct end *end, ssize_t got);
void relay_written(struct end *end, size_t wanted, ssize_t done);
/* splice(2) has moved bytes; begun at both. */
void relay_spliced(struct end *from_end, struct end *to_end, int from, int to, ssize_t moved);
/* The same of sendfile(2), whose source may be a file. */
void relay_file_sent(struct end *from_end, struct end *to_end, int from, int to, ssize_t moved);

/* frames.c. Those that do something have what they need: a socket of frames_get, which is given back with sock_put. */

/* The framed socket behind a descriptor; NULL: it is none. */
struct sock *frames_get(int fd);
int frames_socket(int flags, int protocol);
int frames_bind(struct sock *sock, const struct sockaddr *address, socklen_t length);
int frames_listen(int fd, struct sock *sock);
int frames_connect(int fd, struct sock *sock, const struct sockaddr *address, socklen_t length);
int frames_accept(int fd, struct sock *listener, struct sockaddr *address, socklen_t *length, int flags);
ssize_t frames_send(int fd, struct sock *sock, const void *data, size_t length, int flags);
/* `is_cut`: the frame was longer than the room. */
ssize_t frames_receive(int fd, struct sock *sock, void *data, size_t room, int flags, bool *is_cut);
ssize_t frames_sendmsg(int fd, struct sock *sock, const struct msghdr *message, int flags);
ssize_t frames_recvmsg(int fd, struct sock *sock, struct msghdr *message, int flags);

/* carrier.c */

/* Starts the process that connects the socket to a name, or serves it ("connect", "listen"), and ties the socket to it.
 */
int carrier_start(int fd, const char *verb, const char *name, const char *label);

/* socket.c */

/* The kernel's socket has a port, so that it can have a name. */
int socket_ensure_port(int fd, const struct sock *sock);
/* The socket has the name that it starts flows under. */
int socket_ensure_name(int fd, struct sock *sock);
/* Asks who is at an address of the kernel's. */
int socket_peer(int fd, const struct sock *sock, const struct sockaddr_storage *address, struct service_id *id);

#endif

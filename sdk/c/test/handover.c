/* SPDX-License-Identifier: Apache-2.0
 *
 * Sockets that go from one process to the next, against an agent of a few lines: the bytes and the descriptors of each
 * message, and who has the socket, whatever happens in the middle.
 */
#define _GNU_SOURCE
#include "agent.h"

static struct sockaddr_sv some(unsigned char first, unsigned char bits)
{
	struct sockaddr_sv address = { .sv_family = AF_SERVAL, .sv_prefix_bits = bits };

	address.sv_srvid.s_sid[0] = first;
	return address;
}

static bool is_open(int fd)
{
	return fcntl(fd, F_GETFD) >= 0;
}

static ino_t inode_of(int fd)
{
	struct stat about;

	return fstat(fd, &about) ? 0 : about.st_ino;
}

static int open_count(void)
{
	int count = 0;

	for (int fd = 0; fd < 1024; fd++)
		count += is_open(fd);
	return count;
}

/* The agent closes its ends when it gets to it. */
static bool becomes_open(int count)
{
	struct timespec until;
	int late = 0;
	bool is_so;

	clock_gettime(CLOCK_REALTIME, &until);
	until.tv_sec += 10;
	pthread_mutex_lock(&closing);
	while (!(is_so = open_count() == count) && !late)
		late = pthread_cond_timedwait(&has_closed, &closing, &until);
	pthread_mutex_unlock(&closing);
	return is_so;
}

/* The ends of a TCP connection; the near one is not one of the library's. */
struct pair {
	int near, far;
};

static struct pair tcp(void)
{
	struct sockaddr_in address = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
	socklen_t length = sizeof(address);
	int waiting = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	struct pair pair = { .far = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0) };

	CHECK(!bind(waiting, AS(address)) && !listen(waiting, 1));
	CHECK(!getsockname(waiting, (struct sockaddr *)&address, &length) && !connect(pair.far, AS(address)));
	pair.near = accept4(waiting, NULL, NULL, SOCK_CLOEXEC);
	CHECK(pair.near >= 0 && !close(waiting));
	return pair;
}

/* A listening socket of the library's. */
static int serving(const struct sockaddr_sv *name)
{
	int s = sv_socket(PF_SERVAL, SOCK_STREAM | SOCK_CLOEXEC, 0);

	CHECK(s >= 0 && !sv_bind(s, (const struct sockaddr *)name, sizeof(*name)) && !sv_listen(s, 4));
	return s;
}

/* A client of it. */
static int client_of(int s)
{
	struct sockaddr_storage own;
	struct sockaddr_in address = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
	socklen_t length = sizeof(own);
	int client = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);

	CHECK(!getsockname(s, (struct sockaddr *)&own, &length));
	/* At the same place in addresses of both families. */
	address.sin_port = ((struct sockaddr_in *)&own)->sin_port;
	CHECK(!connect(client, AS(address)));
	return client;
}

static bool is_gone(int far)
{
	char byte;

	return !recv(far, &byte, 1, 0);
}

/* Whether the last request was this, byte for byte. */
static bool was_asked(unsigned char kind, unsigned char protocol, unsigned int bits, unsigned char first)
{
	unsigned char high = (unsigned char)(bits >> 8), low = (unsigned char)bits;
	unsigned char expected[REQUEST_LEN] = { 1, kind, protocol, 0, 0, 0, high, low, first };

	return asked_length == REQUEST_LEN && !memcmp(asked, expected, REQUEST_LEN);
}

static void without_agent(void)
{
	struct sockaddr_sv name = some(1, 0);
	struct pair pair = tcp();

	CHECK(sv_handover(pair.near, NULL, "x", 1) == -1 && errno == ENETDOWN && strstr(sv_strerror(), "margay up"));
	CHECK(is_open(pair.near) && !close(pair.near) && !close(pair.far));
	CHECK(sv_takeover(AS(name)) == -1 && errno == ENETDOWN && strstr(sv_strerror(), path));
}

static void a_plain_socket_and_its_data(void)
{
	struct pair pair = tcp();
	ino_t inode = inode_of(pair.near);
	int before;

	CHECK(!sv_handover(pair.near, NULL, "user 7\0line", 11) && !*sv_strerror());
	CHECK(was_asked(HAND_OVER, IPPROTO_TCP, 0, 0) && passed_count == 2 && control_count == 1);
	CHECK(passed_inode == inode && file_length == 11 && !memcmp(file_data, "user 7\0line", 11));
	CHECK(!strcmp(file_name, "/memfd:margay-hand-over (deleted)"));
	CHECK(!is_open(pair.near) && is_gone(pair.far) && !close(pair.far));
	/* Nothing of it stays, and without data no file goes with it. */
	pair = tcp();
	before = open_count();
	CHECK(!sv_handover(pair.near, NULL, NULL, 0) && open_count() == before - 1 && !is_open(pair.near));
	CHECK(was_asked(HAND_OVER, IPPROTO_TCP, 0, 0) && passed_count == 1 && control_count == 1 && !close(pair.far));
}

static void a_listening_socket(void)
{
	struct sockaddr_sv name = some(0xab, 100);
	struct sockaddr_storage own;
	socklen_t length = sizeof(own);
	int s = serving(&name), copy = dup(s);

	CHECK(!sv_handover(s, NULL, NULL, 0) && !is_open(s));
	CHECK(was_asked(HAND_OVER, IPPROTO_TCP, 100, 0xab) && passed_count == 1 && passed_inode == inode_of(copy));
	/* The same socket of the kernel at the same number is not the library's any more. */
	CHECK(syscall(SYS_dup3, copy, s, O_CLOEXEC) == s && !sv_getsockname(s, (struct sockaddr *)&own, &length));
	CHECK(own.ss_family != AF_SERVAL && !close(s) && !close(copy));
}

static void an_accepted_socket(void)
{
	struct sockaddr_sv name = some(0xac, 0);
	int s = serving(&name), client = client_of(s), accepted = sv_accept(s, NULL, NULL);

	CHECK(accepted >= 0 && !sv_handover(accepted, NULL, "x", 1) && !is_open(accepted));
	CHECK(was_asked(HAND_OVER, IPPROTO_TCP, 256, 0xac) && passed_count == 2 && is_gone(client));
	CHECK(!close(client) && !sv_close(s));
	/* One without a name: the agent finds it. */
	s = sv_socket(PF_SERVAL, SOCK_STREAM, 0);
	CHECK(!sv_handover(s, NULL, NULL, 0) && was_asked(HAND_OVER, IPPROTO_TCP, 0, 0));
}

static void what_is_not_even_sent(void)
{
	unsigned char *much = calloc(1, MIB + 1);
	char host[257] = "";
	struct pair pair = tcp();
	int before = gifts, open_before = open_count();

	memset(host, 'h', sizeof(host) - 1);
	CHECK(sv_handover(pair.near, host, "x", 1) == -1 && errno == ENAMETOOLONG && strstr(sv_strerror(), "256"));
	CHECK(sv_handover(pair.near, NULL, much, MIB + 1) == -1 && errno == E2BIG);
	CHECK(sv_handover(pair.near, NULL, NULL, 1) == -1 && errno == EFAULT);
	CHECK(sv_handover(-1, NULL, NULL, 0) == -1 && errno == EBADF);
	CHECK(sv_handover(1000, NULL, "x", 1) == -1 && errno == EBADF);
	CHECK(gifts == before && open_count() == open_before && is_open(pair.near));
	/* As much as there may be. */
	much[MIB - 1] = 7;
	CHECK(!sv_handover(pair.near, NULL, much, MIB) && gifts == before + 1);
	CHECK(file_length == MIB && !memcmp(file_data, much, MIB) && !close(pair.far));
	free(much);
}

static void another_host(void)
{
	struct pair pair = tcp();

	CHECK(!sv_handover(pair.near, "host2", "x", 1) && !is_open(pair.near) && !close(pair.far));
	CHECK(asked_length == REQUEST_LEN + 5 && !memcmp(asked + REQUEST_LEN, "host2", 5) && passed_count == 2);
	/* Any other one is asked for as a process of this host is. */
	pair = tcp();
	CHECK(!sv_handover(pair.near, "", NULL, 0) && was_asked(HAND_OVER, IPPROTO_TCP, 0, 0) && !close(pair.far));
	/* Neither host has it: it is of no use to the caller. */
	pair = tcp();
	manner = LOSE;
	CHECK(sv_handover(pair.near, "host2", NULL, 0) == -1 && errno == ECONNABORTED && !is_open(pair.near));
	CHECK(!strcmp(sv_strerror(), "nobody has it") && is_gone(pair.far) && !close(pair.far));
}

static void a_refusal(void)
{
	struct sockaddr_sv name = some(0xab, 100), got;
	socklen_t length = sizeof(got);
	int s = serving(&name), before = open_count();
	struct pair pair = tcp();

	manner = REFUSE;
	CHECK(sv_handover(s, NULL, "x", 1) == -1 && errno == ESRCH && !strcmp(sv_strerror(), "nobody takes it"));
	/* It is what it was. */
	CHECK(open_count() == before + 2 && !sv_getsockname(s, (struct sockaddr *)&got, &length));
	CHECK(!memcmp(&got, &name, sizeof(got)) && !sv_close(s));
	/* An agent that knows another version alone has not taken it, either. */
	manner = UPGRADE;
	CHECK(sv_handover(pair.near, NULL, NULL, 0) == -1 && errno == EPROTO && is_open(pair.near));
	CHECK(!sv_handover(pair.near, NULL, NULL, 0) && !close(pair.far));
}

/* The request has reached the agent, and nobody knows what has become of it. */
static void give_in_vain(enum manner how)
{
	struct pair pair = tcp();
	int before = gifts;

	manner = (int)how;
	CHECK(sv_handover(pair.near, NULL, "x", 1) == -1 && errno == ECONNABORTED);
	CHECK(strstr(sv_strerror(), "closed here"));
	CHECK(!is_open(pair.near) && is_gone(pair.far) && gifts == before + 1 && !close(pair.far));
}

static void an_agent_that_dies_in_the_middle(void)
{
	struct sockaddr_sv name;
	int before;

	/* On a connection that was open before, and, since that one has ended, on one that is made for it. */
	CHECK(!sv_name("web.shop", &name));
	before = connections;
	give_in_vain(DIE);
	CHECK(connections == before);
	give_in_vain(DIE);
	CHECK(connections == before + 1);
	give_in_vain(MUMBLE);
	give_in_vain(DIGRESS);
	/* A connection on which a late answer may come is used no more. */
	before = open_count();
	has_no_patience = true;
	give_in_vain(SLEEP);
	has_no_patience = false;
	CHECK(becomes_open(before - 2));
}

static void an_agent_that_has_not_got_it(void)
{
	struct pair pair = tcp();
	struct sockaddr_sv name;
	int before, gifts_before = gifts;

	/* It was started again since the last question: nothing was sent to the one before. */
	is_restarted = true;
	CHECK(!sv_name("web.shop", &name));
	for (int fd = 512; fd < 600; fd++) {
		struct pollfd end = { .fd = fd, .events = POLLIN };

		if (is_open(fd))
			CHECK(poll(&end, 1, 5000) == 1);
	}
	before = connections;
	CHECK(!sv_handover(pair.near, NULL, "x", 1) && connections == before + 1 && gifts == gifts_before + 1);
	CHECK(passed_count == 2 && !close(pair.far));
	/* It has too many programs, and has said so before it closed the connection with the request in it. */
	pair = tcp();
	give_in_vain(DIE);
	is_full = waits_for_end = true;
	CHECK(sv_handover(pair.near, NULL, "x", 1) == -1 && errno == EUSERS && !strcmp(sv_strerror(), "too many"));
	waits_for_end = false;
	CHECK(is_open(pair.near) && !close(pair.near) && !close(pair.far));
}

/* Takes over a name; the agent's end of the connection is `taker`. */
static int take_over(unsigned char first, unsigned char bits)
{
	struct sockaddr_sv name = some(first, bits);
	int takeover;

	taker = -1;
	takeover = sv_takeover(AS(name));
	CHECK(takeover >= 0 && taker >= 0);
	return takeover;
}

static void end(int takeover)
{
	CHECK(!sv_close(takeover) && !close(taker));
}

/* Gives whoever takes over a socket of this name, and other descriptors. */
static void hand(unsigned int bits, unsigned char first, const int passed[], size_t count)
{
	unsigned char bytes[REPLY_LEN] = { 1, HANDED, [4] = (unsigned char)(bits >> 8), (unsigned char)bits, [8] = first };
	union {
		struct cmsghdr header;
		char space[512];
	} control = { 0 };
	struct iovec part = { bytes, sizeof(bytes) };
	struct msghdr message = { .msg_iov = &part, .msg_iovlen = 1 };

	if (count) {
		message.msg_control = &control;
		message.msg_controllen = CMSG_SPACE(count * sizeof(int));
		control.header = (struct cmsghdr){ CMSG_LEN(count * sizeof(int)), SOL_SOCKET, SCM_RIGHTS };
		memcpy(CMSG_DATA(&control.header), passed, count * sizeof(int));
	}
	CHECK(sendmsg(taker, &message, MSG_NOSIGNAL) == REPLY_LEN);
}

/* Tells whoever takes over something that comes with no socket. */
static void tell_of(unsigned char kind, unsigned int bits, unsigned char first, const char *text,
		    const struct sockaddr_in *peer)
{
	unsigned char bytes[REPLY_LEN + 256] = { 1, kind, 0, 0, (unsigned char)(bits >> 8), (unsigned char)bits };
	size_t length = REPLY_LEN + strlen(text);

	bytes[8] = first;
	if (peer) {
		memcpy(bytes + 6, &peer->sin_port, 2);
		bytes[50] = bytes[51] = 0xff;
		memcpy(bytes + 52, &peer->sin_addr, 4);
	}
	memcpy(bytes + REPLY_LEN, text, strlen(text));
	CHECK(send(taker, bytes, length, MSG_NOSIGNAL) == (ssize_t)length);
}

static void tell(unsigned char kind, unsigned int bits, unsigned char first, const char *text)
{
	tell_of(kind, bits, first, text, NULL);
}

/* Whether the agent was answered, once, and byte for byte; else nothing was said, but that it is the end. */
static bool is_answered(void)
{
	static const unsigned char expected[REQUEST_LEN] = { 1, 11 };
	unsigned char bytes[100], again;
	ssize_t got = recv(taker, bytes, sizeof(bytes), MSG_DONTWAIT);

	if (got <= 0)
		return false;
	CHECK(got == REQUEST_LEN && !memcmp(bytes, expected, REQUEST_LEN));
	CHECK(recv(taker, &again, 1, MSG_DONTWAIT) == -1 && errno == EAGAIN);
	return true;
}

static int file_of(const void *data, size_t length)
{
	int file = memfd_create("given", MFD_CLOEXEC);

	CHECK(file >= 0 && write(file, data, length) == (ssize_t)length);
	return file;
}

static void a_name_that_is_taken_over(void)
{
	struct sockaddr_sv name = some(0xab, 100);
	struct pollfd waits = { .events = POLLIN };
	int before = open_count();

	refuses_takers = true;
	CHECK(sv_takeover(AS(name)) == -1 && errno == EACCES && was_asked(TAKE_OVER, 0, 100, 0xab));
	CHECK(becomes_open(before));
	refuses_takers = false;
	CHECK(sv_takeover((struct sockaddr *)&name, 3) == -1 && errno == EINVAL);
	waits.fd = take_over(0xab, 100);
	CHECK(was_asked(TAKE_OVER, 0, 100, 0xab) && passed_count == 0 && fcntl(waits.fd, F_GETFD) == FD_CLOEXEC);
	CHECK(!poll(&waits, 1, 0) && waits.fd < 500);
	CHECK(!fcntl(waits.fd, F_SETFL, O_NONBLOCK) && sv_take(waits.fd, NULL, 0, NULL) == -1 && errno == EAGAIN);
	CHECK(!close(taker) && poll(&waits, 1, 0) == 1 && waits.revents & POLLIN);
	CHECK(sv_take(waits.fd, NULL, 0, NULL) == -1 && errno == ESHUTDOWN && strstr(sv_strerror(), "sv_takeover"));
	CHECK(!sv_close(waits.fd) && sv_take(waits.fd, NULL, 0, NULL) == -1 && errno == EBADF);
	CHECK(!close(take_over(0xab, 0)) && was_asked(TAKE_OVER, 0, 256, 0xab) && !close(taker));
}

static void a_connection_that_is_taken(void)
{
	struct pair pair = tcp();
	int takeover = take_over(0xab, 100), file = file_of("user 7\0line", 11), before, taken, peers_before = peers;
	struct pollfd waits = { .fd = takeover, .events = POLLIN };
	struct sockaddr_sv name = some(0xab, 120), got;
	socklen_t length = sizeof(got);
	char data[32];
	size_t all = 99;

	/* So that a connection for questions is open. */
	CHECK(!sv_name("web.shop", &got));
	/* Whoever has read it leaves the position where it is. */
	CHECK(lseek(file, 5, SEEK_SET) == 5);
	hand(120, 0xab, (const int[]){ pair.near, file }, 2);
	CHECK(!close(pair.near) && !close(file) && poll(&waits, 1, 5000) == 1);
	before = open_count();
	memset(data, '-', sizeof(data));
	taken = sv_take(takeover, data, sizeof(data), &all);
	CHECK(taken >= 0 && fcntl(taken, F_GETFD) == FD_CLOEXEC && all == 11 && !memcmp(data, "user 7\0line-", 12));
	CHECK(is_answered() && open_count() == before + 1 && !*sv_strerror());
	/* It is as an accepted one. */
	CHECK(!sv_getsockname(taken, (struct sockaddr *)&got, &length) && !memcmp(&got, &name, sizeof(got)));
	CHECK(!sv_getpeername(taken, (struct sockaddr *)&got, &length) && got.sv_family == AF_SERVAL);
	CHECK(got.sv_srvid.s_sid[0] == 0x99 && peers == peers_before + 1);
	CHECK(sv_bind(taken, AS(name)) == -1 && errno == EINVAL);
	CHECK(send(pair.far, "x", 1, 0) == 1 && sv_recv(taken, data, 1, 0) == 1);
	/* And may be given on. */
	CHECK(!sv_handover(taken, NULL, NULL, 0) && was_asked(HAND_OVER, IPPROTO_TCP, 120, 0xab) && is_gone(pair.far));
	close(pair.far);
	/* The next one, with more data than is wanted; then with none, and where nobody asks how much. */
	pair = tcp();
	file = file_of("0123456789", 10);
	hand(256, 0xab, (const int[]){ pair.near, file }, 2);
	memset(data, '-', sizeof(data));
	taken = sv_take(takeover, data, 4, &all);
	CHECK(taken >= 0 && all == 10 && !memcmp(data, "0123-", 5) && is_answered() && !sv_close(taken));
	hand(256, 0xab, (const int[]){ pair.near, file }, 2);
	taken = sv_take(takeover, NULL, 0, &all);
	CHECK(taken >= 0 && all == 10 && is_answered() && !sv_close(taken));
	hand(256, 0xab, &pair.near, 1);
	taken = sv_take(takeover, data, 4, &all);
	CHECK(taken >= 0 && all == 0 && !memcmp(data, "0123-", 5) && is_answered() && !sv_close(taken));
	hand(256, 0xab, &pair.near, 1);
	taken = sv_take(takeover, data, 4, NULL);
	CHECK(taken >= 0 && is_answered() && !sv_getsockname(taken, (struct sockaddr *)&got, &length));
	CHECK(got.sv_prefix_bits == 0 && got.sv_srvid.s_sid[0] == 0xab && !sv_close(taken));
	CHECK(!close(pair.near) && !close(pair.far) && !close(file));
	end(takeover);
}

static void a_file_that_is_too_long(void)
{
	unsigned char *much = calloc(1, MIB + 9), *read = calloc(1, MIB + 9);
	struct pair pair = tcp();
	int takeover = take_over(0xab, 0), file, taken;
	size_t all;

	/* The giver may have written to it since the agent looked. */
	much[MIB - 1] = much[MIB] = 7;
	file = file_of(much, MIB + 9);
	hand(256, 0xab, (const int[]){ pair.near, file }, 2);
	taken = sv_take(takeover, read, MIB + 9, &all);
	CHECK(taken >= 0 && all == MIB && !memcmp(read, much, MIB) && !read[MIB] && is_answered());
	CHECK(!sv_close(taken) && !close(file) && !close(pair.near) && !close(pair.far));
	end(takeover);
	free(much);
	free(read);
}

static void a_listening_socket_that_is_taken(void)
{
	struct sockaddr_sv name = some(0xab, 100), got;
	struct sockaddr_in any = { .sin_family = AF_INET };
	socklen_t length = sizeof(got);
	int s = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), takeover = take_over(0xab, 100), peers_before = peers;
	int taken, client, accepted;

	CHECK(!bind(s, AS(any)) && !listen(s, 4));
	/* Who waits in its queue waits for the next process. */
	client = client_of(s);
	hand(100, 0xab, &s, 1);
	CHECK(!close(s));
	taken = sv_take(takeover, NULL, 0, NULL);
	CHECK(taken >= 0 && is_answered() && peers == peers_before);
	CHECK(!sv_getsockname(taken, (struct sockaddr *)&got, &length) && !memcmp(&got, &name, sizeof(got)));
	CHECK(sv_bind(taken, AS(name)) == -1 && errno == EINVAL && !sv_listen(taken, 8));
	accepted = sv_accept(taken, (struct sockaddr *)&got, &length);
	CHECK(accepted >= 0 && got.sv_family == AF_SERVAL && got.sv_srvid.s_sid[0] == 0x99);
	CHECK(!sv_getsockname(accepted, (struct sockaddr *)&got, &length) && !memcmp(&got, &name, sizeof(got)));
	CHECK(!sv_close(accepted) && !sv_handover(taken, NULL, NULL, 0));
	CHECK(was_asked(HAND_OVER, IPPROTO_TCP, 100, 0xab));
	CHECK(!close(client));
	end(takeover);
}

static void sockets_of_the_kernel_alone(void)
{
	struct pair pair = tcp();
	struct sockaddr_in plain;
	socklen_t length = sizeof(plain);
	int takeover = take_over(0xab, 0), ends[2], taken, peers_before = peers;

	hand(0, 0, &pair.near, 1);
	taken = sv_take(takeover, NULL, 0, NULL);
	CHECK(taken >= 0 && is_answered() && !sv_getpeername(taken, (struct sockaddr *)&plain, &length));
	CHECK(plain.sin_family == AF_INET && !sv_close(taken) && !close(pair.near) && !close(pair.far));
	CHECK(!socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends));
	hand(256, 0xab, ends, 1);
	taken = sv_take(takeover, NULL, 0, NULL);
	CHECK(taken >= 0 && is_answered() && inode_of(taken) == inode_of(ends[0]) && peers == peers_before);
	CHECK(!sv_close(taken) && !close(ends[0]) && !close(ends[1]));
	end(takeover);
}

/* Told when a thread is about to wait for a message on this descriptor. */
static atomic_int watched = -1;
static sem_t is_about_to_wait;

ssize_t recvmsg_here(int fd, struct msghdr *message, int flags) __asm__("recvmsg");

ssize_t recvmsg_here(int fd, struct msghdr *message, int flags)
{
	if (fd == watched)
		sem_post(&is_about_to_wait);
	return syscall(SYS_recvmsg, fd, message, flags);
}

static void *take_next(void *takeover)
{
	return (void *)(intptr_t)sv_take((int)(intptr_t)takeover, NULL, 0, NULL);
}

static void one_that_is_waited_for(void)
{
	struct pair pair = tcp();
	int takeover = take_over(0xab, 0);
	pthread_t thread;
	void *taken;

	CHECK(!sem_init(&is_about_to_wait, 0, 0));
	watched = takeover;
	CHECK(!pthread_create(&thread, NULL, take_next, (void *)(intptr_t)takeover) && !sem_wait(&is_about_to_wait));
	watched = -1;
	hand(256, 0xab, &pair.near, 1);
	CHECK(!pthread_join(thread, &taken) && (intptr_t)taken >= 0 && is_answered());
	CHECK(!sv_close((int)(intptr_t)taken) && !close(pair.near) && !close(pair.far));
	end(takeover);
}

static void an_answer_that_is_too_late(void)
{
	struct pair pair = tcp();
	int takeover = take_over(0xab, 0), file = file_of("x", 1), before;

	/* The agent does not listen any more; the giver still has the socket. */
	hand(256, 0xab, (const int[]){ pair.near, file }, 2);
	CHECK(!shutdown(taker, SHUT_RD));
	before = open_count();
	CHECK(sv_take(takeover, NULL, 0, NULL) == -1 && errno == ECONNABORTED && strstr(sv_strerror(), "call again"));
	CHECK(open_count() == before && !close(taker));
	CHECK(sv_take(takeover, NULL, 0, NULL) == -1 && errno == ESHUTDOWN && !sv_close(takeover));
	/* It has ended, and so has the giver: nobody has it. */
	takeover = take_over(0xab, 0);
	hand(256, 0xab, (const int[]){ pair.near, file }, 2);
	CHECK(!close(taker) && !close(pair.near) && !close(file));
	before = open_count();
	CHECK(sv_take(takeover, NULL, 0, NULL) == -1 && errno == ECONNABORTED && open_count() == before);
	CHECK(is_gone(pair.far) && !close(pair.far));
	CHECK(sv_take(takeover, NULL, 0, NULL) == -1 && errno == ESHUTDOWN && !sv_close(takeover));
}

/* Nothing is taken, and the agent is told so at once. */
static void cannot_take(int takeover, int error)
{
	char byte;
	int before = open_count();

	CHECK(sv_take(takeover, NULL, 0, NULL) == -1 && errno == error && *sv_strerror() && open_count() == before);
	CHECK(!recv(taker, &byte, 1, MSG_DONTWAIT));
	CHECK(sv_take(takeover, NULL, 0, NULL) == -1 && errno == ESHUTDOWN);
	end(takeover);
}

static void what_is_not_taken(void)
{
	struct pair pair = tcp();
	int takeover = take_over(0xab, 0), file = file_of("x", 1), pipes[2], fds[2], before, taken;
	struct rlimit limit, low;

	/* More descriptors than there are to be. */
	hand(256, 0xab, (const int[]){ pair.near, file, pair.far, pair.far, file }, 5);
	before = open_count();
	taken = sv_take(takeover, NULL, 0, NULL);
	CHECK(taken >= 0 && inode_of(taken) == inode_of(pair.near) && open_count() == before + 1 && is_answered());
	CHECK(!sv_close(taken));
	/* None, and a name that is none. */
	hand(256, 0xab, NULL, 0);
	cannot_take(takeover, EPROTO);
	takeover = take_over(0xab, 0);
	hand(257, 0xab, &pair.near, 1);
	cannot_take(takeover, EPROTO);
	/* Data that would be waited for. */
	CHECK(!pipe2(pipes, O_CLOEXEC));
	takeover = take_over(0xab, 0);
	hand(256, 0xab, (const int[]){ pair.near, pipes[0] }, 2);
	cannot_take(takeover, EPROTO);
	CHECK(!close(pipes[0]) && !close(pipes[1]));
	/* No descriptor is free, or one alone: a socket without its data is none. */
	CHECK(!getrlimit(RLIMIT_NOFILE, &limit));
	for (int free = 0; free < 2; free++) {
		takeover = take_over(0xab, 0);
		hand(256, 0xab, (const int[]){ pair.near, file }, 2);
		for (int at = 0; at < 2; at++)
			CHECK((fds[at] = dup(file)) >= 0);
		low = (struct rlimit){ .rlim_cur = (rlim_t)fds[free], .rlim_max = limit.rlim_max };
		close(fds[0]);
		close(fds[1]);
		CHECK(!setrlimit(RLIMIT_NOFILE, &low));
		cannot_take(takeover, EMFILE);
		CHECK(!setrlimit(RLIMIT_NOFILE, &limit));
	}
	CHECK(!close(file) && !close(pair.near) && !close(pair.far));
}

static void what_is_to_be_given(void)
{
	struct sockaddr_sv name = some(0xab, 0);
	struct pair pair = tcp();
	struct sockaddr_in peer;
	socklen_t size = sizeof(peer);
	struct sv_give give;
	int takeover, taken;

	taker = -1;
	takeover = sv_takeover_giving(AS(name));
	CHECK(takeover >= 0 && taker >= 0 && asked_length == REQUEST_LEN && !asked[4] && asked[5] == 1);
	tell(GIVE, 100, 0xab, "00ff");
	CHECK(sv_take_giving(takeover, NULL, 0, NULL, &give) == SV_GIVE && !is_answered());
	CHECK(give.name.sv_family == AF_SERVAL && give.name.sv_prefix_bits == 100);
	CHECK(give.name.sv_srvid.s_sid[0] == 0xab && !strcmp(give.to, "00ff"));
	tell(GIVE, 256, 0xab, "");
	CHECK(sv_take_giving(takeover, NULL, 0, NULL, &give) == SV_GIVE && !give.name.sv_prefix_bits && !*give.to);
	CHECK(sv_gives(&give, pair.near) == 1 && sv_gives(&give, pair.far) == 1);
	/* One connection, by its peer. */
	CHECK(!getpeername(pair.near, (struct sockaddr *)&peer, &size) && peer.sin_family == AF_INET);
	tell_of(GIVE, 256, 0xab, "00ff", &peer);
	CHECK(sv_take_giving(takeover, NULL, 0, NULL, &give) == SV_GIVE && give.peer_port == ntohs(peer.sin_port));
	CHECK(sv_gives(&give, pair.near) == 1 && sv_gives(&give, pair.far) == 0);
	CHECK(sv_gives(&give, -1) == -1 && errno == EBADF && *sv_strerror());
	/* What nobody knows, and for who wants sockets alone also what is to be given. */
	tell(99, 7, 0xab, "?");
	hand(256, 0xab, &pair.near, 1);
	taken = sv_take_giving(takeover, NULL, 0, NULL, &give);
	CHECK(taken >= 0 && is_answered() && !sv_close(taken));
	tell(GIVE, 256, 0xab, "");
	tell(99, 7, 0xab, "?");
	hand(256, 0xab, &pair.near, 1);
	taken = sv_take(takeover, NULL, 0, NULL);
	CHECK(taken >= 0 && is_answered() && !sv_close(taken) && !close(pair.near) && !close(pair.far));
	end(takeover);
}

int main(void)
{
	/* Whatever waits for ever fails. */
	alarm(120);
	snprintf(path, sizeof(path), "%s/handover.sock", getenv("WORK"));
	setenv("MARGAY_PROGRAMS", path, 1);
	without_agent();
	start_agent();
	a_plain_socket_and_its_data();
	a_listening_socket();
	an_accepted_socket();
	what_is_not_even_sent();
	another_host();
	a_refusal();
	an_agent_that_dies_in_the_middle();
	an_agent_that_has_not_got_it();
	a_name_that_is_taken_over();
	a_connection_that_is_taken();
	a_file_that_is_too_long();
	a_listening_socket_that_is_taken();
	sockets_of_the_kernel_alone();
	one_that_is_waited_for();
	an_answer_that_is_too_late();
	what_is_not_taken();
	what_is_to_be_given();
	puts("handover: ok");
	return 0;
}

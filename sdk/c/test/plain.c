/* SPDX-License-Identifier: Apache-2.0
 *
 * Ordinary sockets, under the shim: it must be as if it were not there.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define CHECK(that)                                                                           \
	do {                                                                                  \
		if (!(that)) {                                                                \
			fprintf(stderr, "line %d: %s (%s)\n", __LINE__, #that, strerror(errno)); \
			exit(1);                                                              \
		}                                                                             \
	} while (0)

#define AS(address) ((struct sockaddr *)&(address))

int main(void)
{
	struct sockaddr_in any = { .sin_family = AF_INET, .sin_addr = { htonl(INADDR_LOOPBACK) } }, own, peer;
	socklen_t length = sizeof(own);
	int server = socket(AF_INET, SOCK_STREAM, 0), client = socket(AF_INET, SOCK_STREAM, 0), accepted, copy;
	int one = socket(AF_INET, SOCK_DGRAM, 0), other = socket(AF_INET, SOCK_DGRAM, 0), pair[2];
	char data[16] = "";
	struct iovec part = { data, sizeof(data) };
	struct msghdr message = { .msg_name = &peer, .msg_namelen = sizeof(peer), .msg_iov = &part, .msg_iovlen = 1 };

	CHECK(!bind(server, AS(any), sizeof(any)) && !listen(server, 4) && !getsockname(server, AS(own), &length));
	CHECK(length == sizeof(own) && own.sin_family == AF_INET && own.sin_port);
	CHECK(bind(client, AS(own), sizeof(own)) == -1 && errno == EADDRINUSE);
	CHECK(!connect(client, AS(own), sizeof(own)));
	length = sizeof(peer);
	accepted = accept(server, AS(peer), &length);
	CHECK(accepted >= 0 && peer.sin_family == AF_INET && !getpeername(client, AS(peer), &length) && peer.sin_port == own.sin_port);
	copy = fcntl(accepted, F_DUPFD_CLOEXEC, 100);
	CHECK(copy >= 100 && fcntl(copy, F_GETFD) == FD_CLOEXEC && dup2(copy, 90) == 90 && dup3(copy, 91, O_CLOEXEC) == 91);
	CHECK(dup2(-1, 92) == -1 && errno == EBADF);
	CHECK(send(client, "hello", 5, 0) == 5 && recv(copy, data, 5, MSG_WAITALL) == 5 && !memcmp(data, "hello", 5));
	CHECK(!close(copy) && !close(90) && !close(91) && close(91) == -1 && errno == EBADF);
	length = sizeof(own);
	CHECK(!bind(one, AS(any), sizeof(any)) && !getsockname(one, AS(own), &length));
	CHECK(sendto(other, "one", 3, 0, AS(own), sizeof(own)) == 3);
	length = sizeof(peer);
	CHECK(recvfrom(one, data, sizeof(data), 0, AS(peer), &length) == 3 && peer.sin_family == AF_INET);
	message.msg_iov->iov_len = 3;
	CHECK(sendmsg(one, &message, 0) == 3 && recvmsg(other, &message, 0) == 3 && peer.sin_port == own.sin_port);
	CHECK(!socketpair(AF_UNIX, SOCK_STREAM, 0, pair) && write(pair[0], "x", 1) == 1 && read(pair[1], data, 1) == 1);
	CHECK(socket(AF_INET, 99, 0) == -1 && errno == EINVAL);
	puts("plain: ok");
	return 0;
}

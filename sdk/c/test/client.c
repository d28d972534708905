/* SPDX-License-Identifier: Apache-2.0
 *
 * A client of AF_SERVAL, written as the paper's table 1 has it; see server.c. It learns from the server what it is
 * called, and holds that against what it believes itself.
 *
 *   client stream|datagram SID ROUNDS [OWN-SID]
 *   client fetch SID FILE      of a web server, which needs to know nothing of names
 */
#include <poll.h>
#include <unistd.h>

#include "margay.h"
#include "program.h"

static int new_socket(int type, const char *own)
{
	struct sockaddr_sv name;
	int s, result;

	s = socket(PF_SERVAL, type, 0);
	count("socket", s, s >= 0);
	if (own) {
		name = parse(own);
		result = bind(s, (struct sockaddr *)&name, sizeof(name));
		count("bind", result, result == 0);
	}
	return s;
}

/* What came is what this program is called, a blank, and what it has said. */
static bool is_answer(const char *answer, ssize_t length, const struct sockaddr_sv *own, const char *said)
{
	char wanted[256];

	snprintf(wanted, sizeof(wanted), "%s %s", written(own), said);
	if (length == (ssize_t)strlen(wanted) && !memcmp(answer, wanted, (size_t)length))
		return true;
	fprintf(stderr, "wanted %s, got %.*s\n", wanted, length > 0 ? (int)length : 0, answer);
	return false;
}

static struct sockaddr_sv own_name(int s)
{
	struct sockaddr_sv own = { 0 };
	socklen_t length = sizeof(own);
	int result = getsockname(s, (struct sockaddr *)&own, &length);

	count("getsockname", result, result == 0 && length == sizeof(own) && own.sv_family == AF_SERVAL);
	return own;
}

static int run_stream(const struct sockaddr_sv *server, int rounds, const char *name)
{
	struct sockaddr_sv own, peer;
	socklen_t length = sizeof(peer);
	char said[64], answer[256];
	int s = new_socket(SOCK_STREAM, name), result;
	ssize_t done;

	result = connect(s, (const struct sockaddr *)server, sizeof(*server));
	count("connect", result, result == 0);
	if (result)
		return report("", "");
	own = own_name(s);
	result = getpeername(s, (struct sockaddr *)&peer, &length);
	count("getpeername", result, result == 0 && is_same(&peer, server));
	for (int round = 0; round < rounds; round++) {
		snprintf(said, sizeof(said), "round %d", round);
		done = send(s, said, strlen(said), 0);
		count("send", done, done == (ssize_t)strlen(said));
		done = recv(s, answer, 65 + strlen(said), MSG_WAITALL);
		count("recv", done, is_answer(answer, done, &own, said));
	}
	result = close(s);
	count("close", result, result == 0);
	return report(written(&own), written(&peer));
}

static int run_datagram(const struct sockaddr_sv *server, int rounds, const char *name)
{
	struct sockaddr_sv own = { 0 }, from = { 0 };
	char said[64], answer[256];
	int s = new_socket(SOCK_DGRAM, name), result;
	ssize_t done;

	for (int round = 0; round < rounds; round++) {
		struct pollfd wanted = { .fd = s, .events = POLLIN };
		socklen_t length = sizeof(from);

		snprintf(said, sizeof(said), "round %d", round);
		done = sendto(s, said, strlen(said), 0, (const struct sockaddr *)server, sizeof(*server));
		count("sendto", done, done == (ssize_t)strlen(said));
		own = own_name(s);
		result = poll(&wanted, 1, 10000);
		count("poll", result, result == 1);
		if (result != 1)
			break;
		done = recvfrom(s, answer, sizeof(answer), 0, (struct sockaddr *)&from, &length);
		count("recvfrom", done, is_answer(answer, done, &own, said) && is_same(&from, server));
	}
	result = close(s);
	count("close", result, result == 0);
	return report(written(&own), written(&from));
}

static int run_fetch(const struct sockaddr_sv *server, const char *file)
{
	char said[256], answer[4096] = "";
	int s = new_socket(SOCK_STREAM, NULL), result;
	const char *body;
	ssize_t done;

	result = connect(s, (const struct sockaddr *)server, sizeof(*server));
	count("connect", result, result == 0);
	snprintf(said, sizeof(said), "GET /%s HTTP/1.0\r\n\r\n", file);
	done = send(s, said, strlen(said), 0);
	count("send", done, done == (ssize_t)strlen(said));
	done = recv(s, answer, sizeof(answer) - 1, MSG_WAITALL);
	body = strstr(answer, "\r\n\r\n");
	count("recv", done, done > 0 && body);
	printf("%s", body ? body + 4 : "");
	result = close(s);
	count("close", result, result == 0);
	return report("", "");
}

int main(int argc, char **argv)
{
	struct sockaddr_sv server;

	if (argc < 4)
		return 2;
	server = parse(argv[2]);
	if (!strcmp(argv[1], "fetch"))
		return run_fetch(&server, argv[3]);
	if (!strcmp(argv[1], "stream"))
		return run_stream(&server, atoi(argv[3]), argc > 4 ? argv[4] : NULL);
	return run_datagram(&server, atoi(argv[3]), argc > 4 ? argv[4] : NULL);
}

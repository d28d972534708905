/* Sends frames to a server of frames, or to an ensemble, and prints the answers. A word with a colon has a key
 * before it.
 *
 *   frames-client work.shop user1:hello user2:hello
 */
#include <margay.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int failed(const char *name)
{
	fprintf(stderr, "%s: %s\n", name, sv_strerror());
	return 1;
}

int main(int argc, char **argv)
{
	const char *written = argc > 1 ? argv[1] : "work.shop";
	char *data = malloc(SV_FRAME_MAX);
	struct sockaddr_sv name;
	struct sv_frame frame;
	ssize_t got;
	int s;

	s = sv_socket(PF_SERVAL, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
	if (!data || s < 0 || sv_name(written, &name) || sv_connect(s, (struct sockaddr *)&name, sizeof(name)))
		return failed(written);
	for (int word = 2; word < argc; word++) {
		size_t key = strchr(argv[word], ':') ? strcspn(argv[word], ":") : 0;

		/* Nothing that would harm if two servers did it. */
		frame = (struct sv_frame){ .sf_flags = SV_SAFE | SV_WANTS_ANSWER };
		frame.sf_key_length = (uint8_t)(key < SV_KEY_MAX ? key : SV_KEY_MAX);
		memcpy(frame.sf_key, argv[word], frame.sf_key_length);
		if (sv_sendframe(s, argv[word], strlen(argv[word]), &frame, 0) < 0)
			return failed(written);
	}
	for (int word = 2; word < argc; word++) {
		got = sv_recvframe(s, data, SV_FRAME_MAX, &frame, 0);
		if (got < 0 || frame.sf_flags & SV_END)
			return failed(written);
		if (frame.sf_flags & SV_LOST)
			printf("nobody says what has become of frame %u\n", frame.sf_number);
		else
			printf("%.*s\n", (int)got, data);
	}
	free(data);
	return sv_close(s);
}

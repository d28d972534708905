/* Tells the time to whoever connects to time.shop. See docs/book/programming.md. */
#include <margay.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

int main(void)
{
	struct sockaddr_sv name, client;
	char text[SV_STRLEN];
	socklen_t length;
	int s, c;

	s = sv_socket(PF_SERVAL, SOCK_STREAM, 0);
	if (s < 0 || sv_name("time.shop", &name) || sv_bind(s, (struct sockaddr *)&name, sizeof(name)) || sv_listen(s, 16)) {
		fprintf(stderr, "time.shop: %s\n", sv_strerror());
		return 1;
	}
	while (length = sizeof(client), (c = sv_accept(s, (struct sockaddr *)&client, &length)) >= 0) {
		time_t now = time(NULL);
		const char *line = ctime(&now);

		printf("asked by %s\n", sv_ntop(&client, text, sizeof(text)));
		fflush(stdout);
		sv_send(c, line, strlen(line), 0);
		sv_close(c);
	}
	return 1;
}
